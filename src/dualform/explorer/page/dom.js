// Elements from plain values. Text is always text: nothing here, or anywhere, parses HTML.

export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else if (name === "value") element.value = value;
    else if (name === "checked") element.checked = value;
    else element.setAttribute(name === "className" ? "class" : name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function fill(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function say(text) {
  const status = document.getElementById("status");
  if (status) status.textContent = text;
}

export const problem = (error) => h("p", { class: "problem", role: "alert" }, error.message ?? String(error));

export const skeleton = (height = 120) => h("div", { class: "skeleton", style: { "min-height": `${height}px` }, "aria-hidden": "true" });

// Numbers as people read them.
export function number(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return minus(value.toExponential(1));
  if (size >= 1000) return minus(Math.round(value).toLocaleString("en"));
  return minus(String(Number(value.toPrecision(digits))));
}
const minus = (text) => text.replace("-", "−");
export const visits = (count) => `${whole(count)} ${count === 1 ? "visit" : "visits"}`;
export const whole = (value) => value.toLocaleString("en");
export function percent(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0 || value === 1) return `${100 * value} %`;
  if (value < 0.0005) return "< 0.1 %";
  return value > 0.9995 ? "> 99.9 %" : `${(100 * value).toFixed(1)} %`;
}
export function bytes(value) {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) if (value >= size) return `${(value / size).toFixed(1)} ${unit}`;
  return `${value} bytes`;
}
