// A training example: what it wrote over time, who reads it, and whether its label is likely to be wrong.
import { h, fill, problem, skeleton, number, whole } from "./dom.js";
import { get } from "./api.js";
import { go, link, changed } from "./state.js";
import { sample as shownSample, chip, choice, verdict } from "./parts.js";

export const title = "Training example";

export async function show(place, { run, parameters, signal }) {
  const layers = run.layers.filter((layer) => layer.attends);
  const layer = parameters.get("layer") ?? layers[layers.length - 1]?.name;
  const key = parameters.getAll("key");
  fill(place, skeleton(300));
  if (!key.length) { fill(place, h("p", { class: "note" }, "Choose a training example: each picture under a prediction leads here.")); return; }
  const found = await get("/api/sample", { key, layer }, signal);
  const set = (changes) => go("sample", changed(parameters, changes));
  const example = JSON.stringify(found.key);
  fill(place, h("div", { class: "stack" },
    h("section", { class: "card" }, h("div", { class: "input" }, shownSample(found.shown, found.title), h("div", {},
      h("div", { class: "line", style: { "margin-bottom": "8px" } }, h("h1", {}, `Training example ${found.title}`), found.label && h("span", { class: "quiet" }, "label ", chip(found.label))),
      h("dl", { class: "facts" }, Object.entries(found.columns).map(([name, value]) => [h("dt", {}, name), h("dd", {}, String(value))]),
        h("dt", {}, "visits"), h("dd", {}, `${found.visits.length}`),
        found.suspicion !== null && [h("dt", {}, "label suspect"), h("dd", {}, `score ${number(found.suspicion)}, rank ${whole(found.suspicion_rank)} of ${whole(found.suspected)}`)]),
      h("div", { class: "line", style: { "margin-top": "10px" } }, run.tests > 0 && h("a", { href: link("edit", { example: [example] }) }, "Switch it off"), !run.suspects && found.suspicion === null && h("a", { href: link("suspects") }, "How likely is its label wrong?"))))),
    layers.length > 1 && h("div", { class: "line" }, h("span", { class: "quiet" }, "Layer"), choice("Layer", layers.map((one) => ({ value: one.name, name: one.name })), layer, (value) => set({ layer: value }))),
    found.problem && h("p", { class: "note" }, found.problem),
    found.visits.length > 0 && h("section", { class: "card" }, h("h2", {}, "What it wrote over time"), h("p", { class: "quiet small" }, found.units.length ? "At each visit the example wrote its value under its key: for a query like itself, it pushes each output up or down by this much per unit of attention." : "At each visit the example wrote key ⊗ value; their lengths say how much."), written(found)),
    h("section", { class: "card" }, h("h2", {}, "Test examples that attend to it most"), h("p", { class: "quiet small" }, `By the size of the attention weight, summed over its visits, among ${whole(found.read_among)} test examples.`), readers(found))));
}

function written(found) {
  if (!found.units.length) {
    return h("div", { class: "scroll" }, h("table", { class: "lines" }, h("thead", {}, h("tr", {}, ["Step", "Length of key", "Length of value", "Product"].map((name) => h("th", { scope: "col", class: "number" }, name)))),
      h("tbody", {}, found.visits.map((visit) => h("tr", {}, [visit.step, visit.key, visit.value, visit.key * visit.value].map((value) => h("td", { class: "number" }, number(value))))))));
  }
  const size = Math.max(...found.visits.flatMap((visit) => visit.values.map(Math.abs)), 1e-30);
  const cell = (value) => { const share = Math.round(70 * Math.min(1, Math.abs(value) / size)); return h("td", { style: { background: `color-mix(in srgb, var(${value > 0 ? "--bar" : "--minus"}) ${share}%, transparent)` } }, number(value, 2)); };
  return h("div", { class: "scroll" }, h("table", { class: "heat" }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "step"), h("th", { scope: "col" }, "|key|"), found.units.map((unit) => h("th", { scope: "col", style: { "text-align": "right" } }, unit.name)))),
    h("tbody", {}, found.visits.map((visit) => h("tr", {}, h("th", { scope: "row" }, whole(visit.step)), h("td", {}, number(visit.key)), visit.values.map(cell))))));
}

function readers(found) {
  if (!found.readers.length) return h("p", { class: "quiet" }, "No test examples were given.");
  return h("ul", { class: "grid", style: { "grid-template-columns": "repeat(auto-fill, minmax(86px, 1fr))" } }, found.readers.map((reader) => h("li", {}, h("a", { href: link("prediction", { input: reader.example.input }), "aria-label": `${reader.example.title}, weight ${number(reader.weight)}` },
    shownSample(reader.example.shown, ""), h("span", { class: "told small", style: { display: "block" }, "aria-hidden": "true" }, chip(reader.example.label ?? reader.example.answer), " ", h("b", {}, number(reader.weight)), reader.contribution !== null && [h("br"), h("span", { class: "quiet" }, `adds ${number(reader.contribution)}`)])))));
}
