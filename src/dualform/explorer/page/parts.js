// What several views show: samples, classes, bars, jobs.
import { h, number, percent, fill, problem, say } from "./dom.js";
import { colourOf, inkOn } from "./colours.js";
import { get, remove, isReport } from "./api.js";
import { again } from "./state.js";

export function sample(shown, alternative) {
  if (shown.kind === "image") {
    return h("img", { class: `picture${shown.ink ? " ink" : ""}`, src: shown.source, alt: alternative, width: shown.width, height: shown.height });
  }
  if (shown.kind === "text") return h("span", { class: "excerpt" }, shown.text);
  if (shown.kind === "vector") return vector(shown.numbers, alternative);
  return h("span", { class: "nothing" }, "not at hand");
}

// A row of numbers as a small bar chart.
function vector(numbers, alternative) {
  const size = Math.max(...numbers.map(Math.abs), 1e-12);
  const space = "http://www.w3.org/2000/svg";
  const picture = document.createElementNS(space, "svg");
  picture.setAttribute("viewBox", `0 0 ${Math.max(numbers.length, 1)} 20`);
  picture.setAttribute("preserveAspectRatio", "none");
  picture.setAttribute("class", "picture vector");
  picture.setAttribute("role", "img");
  picture.setAttribute("aria-label", alternative);
  numbers.forEach((value, place) => {
    const bar = document.createElementNS(space, "rect");
    const length = (Math.abs(value) / size) * 9.5;
    const box = { x: place + 0.1, y: value > 0 ? 10 - length : 10, width: 0.8, height: Math.max(length, 0.2) };
    for (const [name, one] of Object.entries(box)) bar.setAttribute(name, one);
    bar.setAttribute("fill", value > 0 ? "#0077BB" : "#CC6677");
    picture.append(bar);
  });
  return picture;
}

export function chip(named) {
  if (!named) return null;
  const colour = colourOf(named.colour);
  return h("span", { class: "chip", style: { background: colour, color: inkOn(colour) }, title: named.name }, named.name);
}

export const verdict = (right) => (right === null || right === undefined ? null : h("span", { class: right ? "right" : "wrong" }, right ? "right" : "wrong"));

// Bars from zero to both sides. lines: {name, value, colour, told, strong}
export function bars(lines, { caption, from = undefined } = {}) {
  const low = Math.min(0, ...lines.map((line) => line.value ?? 0));
  const high = Math.max(from ?? 0, ...lines.map((line) => line.value ?? 0), 1e-12 + low);
  const place = (value) => (100 * (value - low)) / (high - low);
  return h("table", { class: "bars" }, h("caption", { class: "hidden" }, caption),
    h("tbody", {}, lines.map((line) => {
      const value = line.value ?? 0;
      const [left, right] = [place(Math.min(0, value)), place(Math.max(0, value))];
      return h("tr", { class: line.strong ? "strong" : "" },
        h("th", { scope: "row", title: line.name }, line.name),
        h("td", {}, h("div", { class: "track" }, low < 0 && h("u", { style: { left: `${place(0)}%` } }),
          h("i", { style: { left: `${left}%`, width: `${right - left}%`, background: line.colour ?? "var(--bar)" } }))),
        h("td", { class: "number" }, line.told ?? number(line.value)));
    })));
}

// Bars that add up: each begins where the one before has ended; the last is the sum.
export function adding(lines, sum, { caption } = {}) {
  let at = 0;
  const placed = lines.map((line) => { const begin = at; at += line.value; return { ...line, begin, end: at }; });
  placed.push({ name: sum.name, value: sum.value, begin: 0, end: sum.value, sum: true, colour: sum.colour });
  const low = Math.min(0, ...placed.flatMap((line) => [line.begin, line.end]));
  const high = Math.max(0, ...placed.flatMap((line) => [line.begin, line.end]), low + 1e-12);
  const place = (value) => (100 * (value - low)) / (high - low);
  return h("table", { class: "bars" }, h("caption", { class: "hidden" }, caption),
    h("tbody", {}, placed.map((line) => h("tr", { class: line.sum ? "sum" : "" },
      h("th", { scope: "row", title: line.name }, line.name),
      h("td", {}, h("div", { class: "track" }, h("u", { style: { left: `${place(0)}%` } }),
        h("i", { style: { left: `${place(Math.min(line.begin, line.end))}%`, width: `${Math.abs(place(line.end) - place(line.begin))}%`, background: line.colour } }))),
      h("td", { class: "number" }, (line.sum ? "= " : line.value >= 0 ? "+" : "") + number(line.value))))));
}

export function probabilities(prediction, { limit = 10 } = {}) {
  const lines = prediction.units.slice(0, limit).map((unit) => ({
    name: unit.name, value: unit.probability ?? 0, colour: colourOf(unit.colour), told: percent(unit.probability),
    strong: unit.unit === prediction.answer,
  }));
  return bars(lines, { caption: "Probability of each output", from: 1 });
}

// One of several, as radio buttons: arrow keys move.
export function choice(name, options, chosen, choose) {
  const buttons = options.map((option) => h("button", {
    type: "button", role: "radio", "aria-checked": String(option.value === chosen), tabindex: option.value === chosen ? "0" : "-1",
    class: option.missing ? "quiet" : undefined, onclick: () => choose(option.value),
  }, option.name));
  const group = h("div", { class: "switch", role: "radiogroup", "aria-label": name }, buttons);
  group.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = buttons[(buttons.indexOf(document.activeElement) + step + buttons.length) % buttons.length];
    next.focus();
    next.click();
  });
  return group;
}

// What long work says of itself, for people.
const WORDS = {
  queries: "asking the network at moments of its training …", curvature: "measuring curvature …", masking: "putting the network together without it …",
  verify: "beginning …", edit: "beginning …", influence: "beginning …", verifying: "comparing with the trained weights …", totals: "adding up …", suspects: "ranking all training examples …",
};

// A way to look that this run cannot show: why not.
export const refused = (view) => h("p", { class: "note" }, h("b", {}, `${view.name} cannot be shown here: `), `${view.missing.replace(/\.$/, "")}.`);

// Long work: how far it is, and a way to stop it. `finished` gets the result. Who leaves the view does not want it any more, unless
// it lasts: then it is done all the same.
export async function follow(job, place, { signal, finished, lasting = false } = {}) {
  const stop = () => remove(`/api/jobs/${job.id}`).catch(() => {});
  if (signal?.aborted && !lasting) { stop(); return; } // the view was left while the job began
  if (!lasting) signal?.addEventListener("abort", () => { if (["waiting", "running"].includes(job.state)) stop(); }, { once: true });
  const bar = h("progress", { max: 1, "aria-label": "Progress" });
  const told = h("span", { class: "small quiet" }, "waiting …");
  const cancel = h("button", { type: "button", onclick: () => { cancel.disabled = true; told.textContent = "cancelling …"; stop(); } }, "Cancel");
  fill(place, h("div", { class: "job" }, told, bar, cancel));
  while (!signal?.aborted) {
    if (job.state === "done") { say("Done."); return finished(job.result); }
    if (job.state === "failed") { fill(place, problem(new Error(job.problem))); return; }
    if (job.state === "cancelled") { fill(place, h("div", { class: "line" }, h("span", {}, "Cancelled: the work has stopped."), h("button", { type: "button", onclick: again }, "Begin again"))); say("Cancelled."); return; }
    if (!cancel.disabled) told.textContent = WORDS[job.what] ?? (job.what || "waiting …");
    if (job.total) { bar.max = job.total; bar.value = job.done; }
    await new Promise((resolve) => setTimeout(resolve, 250));
    try { job = await get(`/api/jobs/${job.id}`, {}, signal); } catch (error) { if (error.name !== "AbortError") fill(place, problem(error)); return; }
  }
}

export const copyLink = () => isReport ? null : h("button", {
  type: "button", onclick: async (event) => {
    const button = event.currentTarget;
    try { await navigator.clipboard.writeText(location.href); button.textContent = "Copied"; } catch { button.textContent = "Copy the address bar"; }
    setTimeout(() => { button.textContent = "Copy link"; }, 1500);
  },
}, "Copy link");
