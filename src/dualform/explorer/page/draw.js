// A pad to draw on: 32 × 32 fields with 16 levels of ink. With the keyboard: arrows move, the space bar puts the pen down or up.
import { h } from "./dom.js";

const SIDE = 32, SCALE = 8;

export function pad(input, ask) {
  const ink = new Float32Array(SIDE * SIDE);
  if (input?.startsWith("draw:")) [...input.slice(5)].slice(0, SIDE * SIDE).forEach((digit, place) => { ink[place] = (parseInt(digit, 16) || 0) / 15; });
  const canvas = h("canvas", { class: "draw", width: SIDE * SCALE, height: SIDE * SCALE, tabindex: 0, role: "img",
    "aria-label": "Drawing pad. With the keyboard: arrow keys move the pen, the space bar puts it down or lifts it, Enter asks." });
  const context = canvas.getContext("2d");
  const pen = { x: SIDE / 2, y: SIDE / 2, down: false };
  let last = null;

  function paint() {
    context.fillStyle = "#ffffff";
    context.fillRect(0, 0, canvas.width, canvas.height);
    ink.forEach((value, place) => {
      if (!value) return;
      context.fillStyle = `rgb(27 31 36 / ${value})`;
      context.fillRect((place % SIDE) * SCALE, Math.floor(place / SIDE) * SCALE, SCALE, SCALE);
    });
    if (document.activeElement === canvas && canvas.matches(":focus-visible")) {
      context.strokeStyle = pen.down ? "#B0304A" : "#332288";
      context.lineWidth = 2;
      context.strokeRect(pen.x * SCALE - 6, pen.y * SCALE - 6, 12, 12);
    }
  }
  function dab(x, y) {
    for (let row = Math.max(0, Math.floor(y - 3)); row < Math.min(SIDE, y + 3); row++) {
      for (let column = Math.max(0, Math.floor(x - 3)); column < Math.min(SIDE, x + 3); column++) {
        const distance = Math.hypot(column + 0.5 - x, row + 0.5 - y);
        const place = row * SIDE + column;
        ink[place] = Math.max(ink[place], Math.min(1, Math.max(0, 2.1 - distance)));
      }
    }
  }
  function stroke(x, y) {
    const from = last ?? [x, y];
    const steps = Math.max(1, Math.ceil(Math.hypot(x - from[0], y - from[1]) * 2));
    for (let step = 1; step <= steps; step++) dab(from[0] + ((x - from[0]) * step) / steps, from[1] + ((y - from[1]) * step) / steps);
    last = [x, y];
    paint();
  }
  const at = (event) => { const box = canvas.getBoundingClientRect(); return [((event.clientX - box.left) / box.width) * SIDE, ((event.clientY - box.top) / box.height) * SIDE]; };
  canvas.addEventListener("pointerdown", (event) => { canvas.setPointerCapture(event.pointerId); last = null; stroke(...at(event)); event.preventDefault(); });
  canvas.addEventListener("pointermove", (event) => { if (event.buttons) stroke(...at(event)); });
  canvas.addEventListener("pointerup", () => { last = null; submit(); });
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (event.key === " ") { pen.down = !pen.down; last = null; if (pen.down) stroke(pen.x, pen.y); }
    else if (event.key === "Enter") submit();
    else if (move) { pen.x = Math.min(SIDE - 1, Math.max(1, pen.x + move[0])); pen.y = Math.min(SIDE - 1, Math.max(1, pen.y + move[1])); if (pen.down) stroke(pen.x, pen.y); }
    else return;
    event.preventDefault();
    paint();
  });
  canvas.addEventListener("focus", paint);
  canvas.addEventListener("blur", paint);
  function submit() { if (ink.some((value) => value > 0.1)) ask(`draw:${Array.from(ink, (value) => Math.round(value * 15).toString(16)).join("")}`); }
  paint();
  return h("div", { style: { "margin-top": "10px" } }, canvas,
    h("div", { class: "line", style: { "margin-top": "8px" } }, h("button", { type: "button", onclick: () => { ink.fill(0); paint(); } }, "Clear"), h("span", { class: "quiet small" }, "The answer follows each stroke.")));
}
