// The frame: header, theme, and the view that the address names.
import { h, fill, problem, say } from "./dom.js";
import { get, isReport } from "./api.js";
import { read, link } from "./state.js";
import { take } from "./colours.js";
import * as run from "./run.js";
import * as prediction from "./prediction.js";
import * as edit from "./edit.js";
import * as sample from "./sample.js";
import * as suspects from "./suspects.js";
import * as text from "./text.js";
import * as help from "./help.js";

const VIEWS = { run, prediction, edit, sample, suspects, text, api: help };
const main = document.getElementById("main");
let known = null;
let leaving = new AbortController();

function theme(choice) {
  document.documentElement.dataset.theme = choice ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}
function remembered() { try { return localStorage.getItem("dualform-theme"); } catch { return null; } }
theme(remembered());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (!remembered()) { theme(null); show(); } });

function header() {
  const { view, parameters } = read();
  const input = parameters.get("input");
  const tabs = [["run", "Run", {}]];
  if (known.tests || known.draws) tabs.push(["prediction", "Prediction", { input }], ...(known.edits ? [] : [["edit", "Memory edit", { input }]]));
  if (known.text) tabs.push(["text", "Text", {}]);
  if (known.by.length && known.label && !isReport) tabs.push(["suspects", "Suspects", {}]);
  if (!isReport) tabs.push(["api", "API", {}]);
  const dark = document.documentElement.dataset.theme === "dark";
  fill(document.getElementById("top"), h("div", { class: "bar" },
    h("a", { class: "brand", href: "#/run" }, h("img", { src: window.dualformIcon ?? "/page/icon.svg", alt: "" }), "dualform", h("span", { class: "title" }, known.title)),
    h("nav", { "aria-label": "Views" }, tabs.map(([name, title, given]) => h("a", { href: link(name, given), "aria-current": name === view ? "page" : undefined }, title))),
    h("button", {
      type: "button", class: "icon", "aria-label": dark ? "Light colours" : "Dark colours", title: dark ? "Light colours" : "Dark colours",
      onclick: () => { const next = dark ? "light" : "dark"; try { localStorage.setItem("dualform-theme", next); } catch { /* not kept */ } theme(next); show(); },
    }, dark ? "☀" : "☾")));
  const nav = document.querySelector("#top nav"), here = nav.querySelector("[aria-current]");
  if (here) nav.scrollLeft = here.offsetLeft - nav.offsetLeft - (nav.clientWidth - here.clientWidth) / 2; // on a narrow page tabs scroll
}

async function show() {
  leaving.abort();
  leaving = new AbortController();
  const { signal } = leaving;
  const { view, parameters } = read();
  header();
  const chosen = VIEWS[view] ?? run;
  document.title = `${chosen.title} · ${known.title} · dualform`;
  try {
    await chosen.show(main, { run: known, parameters, signal, refresh });
  } catch (error) {
    if (error.name !== "AbortError" && !signal.aborted) fill(main, problem(error));
  }
}

async function refresh(found) {
  known = found ?? (await get("/api/run"));
  take(known);
  await show();
}

let last = "";
window.addEventListener("hashchange", () => {
  const { view } = read();
  if (view !== last) { scrollTo(0, 0); say(`${(VIEWS[view] ?? run).title} view`); }
  last = view;
  if (known) show();
});
last = read().view;
get("/api/run").then(refresh).catch((error) => fill(main, problem(error)));
