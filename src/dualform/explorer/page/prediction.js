// A prediction: the input, what the model says, and for each layer where that comes from.
import { h, fill, problem, skeleton, number, whole, visits, percent, say } from "./dom.js";
import { get, post, isReport } from "./api.js";
import { go, link, changed } from "./state.js";
import { sample, chip, verdict, probabilities, bars, adding, choice, copyLink, follow, refused } from "./parts.js";
import { chooser } from "./chooser.js";
import { curves, timeline } from "./charts.js";
import { colourOf } from "./colours.js";

export const title = "Prediction";
const WORDS = { attention: "weight", contribution: "contribution", influence: "influence" };
const AT_ONCE = 3;
const MOST_PROBABLE = 5;

export async function show(place, context) {
  const { run, parameters, signal } = context;
  const beside = h("div", { class: "stack" }, skeleton(180), skeleton(400));
  fill(place, h("h1", { class: "hidden" }, "Prediction"), h("div", { class: "beside" }, chooser("prediction", context), beside));
  let input = parameters.get("input");
  if (!input) {
    const first = (await get("/api/examples", { limit: 40 }, signal)).examples[0];
    if (!first) { fill(beside, h("p", { class: "note" }, "There are no test examples. Give them with dual.explore(test=…).")); return; }
    go("prediction", changed(parameters, { input: first.input }), { replace: true });
    return;
  }
  const found = await get("/api/prediction", { input }, signal);
  say(`${found.title}: the model says ${found.units[0].name}, ${percent(found.units[0].probability)}`);
  const kind = parameters.get("kind") ?? "attention";
  const view = run.views.find((one) => one.kind === kind) ?? run.views[0];
  const target = parameters.has("target") ? Number(parameters.get("target")) : found.answer;
  const absolute = parameters.get("absolute") === "true";
  const set = (changes) => go("prediction", changed(parameters, changes));
  const attending = run.layers.filter((layer) => layer.attends || kind !== "attention");
  const layers = chosenLayers(attending, parameters);
  const cards = view.missing ? [] : layers.map((layer) => h("section", { class: "card", "aria-label": `Layer ${layer.name}` }, heading(layer), skeleton(300)));
  fill(beside, summary(found, run),
    h("section", { class: "stack", style: { gap: "10px" }, "aria-label": "How to look at it" },
      h("div", { class: "line" },
        choice("How to look at it", run.views.map((one) => ({ value: one.kind, name: one.name, missing: one.missing })), kind, (value) => set({ kind: value })),
        kind !== "attention" && targets(found, target, (value) => set({ target: value })),
        kind === "attention" && !isReport && h("label", { class: "check" }, h("input", { type: "checkbox", checked: absolute, onchange: (event) => set({ absolute: event.target.checked ? "true" : null }) }), "sizes, as in the paper's figures")),
      h("p", { class: "note" }, view.sentence), view.missing && refused(view),
      attending.length > AT_ONCE && !view.missing && h("div", { class: "toggles", role: "group", "aria-label": "Layers" }, attending.map((layer) => h("button", {
        type: "button", "aria-pressed": String(!layers.includes(layer)),
        onclick: () => set({ layer: layers.includes(layer) ? layers.filter((one) => one !== layer).map((one) => one.name) : [...layers, layer].map((one) => one.name) }),
      }, layer.name)))),
    h("div", { class: "layers" }, cards));
  if (view.missing) return;
  let estimated = null;
  if (kind === "influence" && !isReport) {
    const waiting = h("div", { class: "card" });
    beside.insertBefore(waiting, beside.lastElementChild);
    await follow(await post("/api/jobs", { kind: "influence", input, target }), waiting, { signal, finished: (prepared) => { estimated = prepared.layers; waiting.remove(); } });
    if (!estimated) { cards.forEach((card) => card.querySelector(".skeleton")?.remove()); return; }
  }
  await Promise.all(layers.map(async (layer, at) => {
    if (estimated && !estimated.includes(layer.name)) { fill(cards[at], heading(layer), h("p", { class: "quiet small" }, "This layer was not called for this input.")); return; }
    try {
      const asked = { input, layer: layer.name, kind, target: kind === "attention" ? null : target, absolute: kind === "attention" && absolute ? "true" : null };
      const sources = await get("/api/sources", asked, signal);
      fill(cards[at], heading(layer), layerCard(sources, { run, found, layer }));
    } catch (error) { if (error.name !== "AbortError") fill(cards[at], heading(layer), problem(error)); }
  }));
}

function chosenLayers(layers, parameters) {
  const asked = parameters.getAll("layer");
  if (asked.length) return layers.filter((layer) => asked.includes(layer.name));
  if (layers.length <= AT_ONCE) return layers;
  return [layers[0], layers[Math.floor(layers.length / 2)], layers[layers.length - 1]];
}

const heading = (layer) => h("h2", {}, `Layer ${layer.name} `, h("span", { class: "quiet small", style: { "font-weight": 400 } }, `${whole(layer.d_in)} → ${whole(layer.d_out)}, ${whole(layer.slots)} slots`));

function summary(found, run) {
  const right = found.label ? found.label.value === found.answer || found.label.name === found.units[0].name : null;
  return h("section", { class: "card", "aria-label": "The input and the answer" }, h("div", { class: "input" },
    sample(found.shown, found.title),
    h("div", {},
      h("div", { class: "line", style: { "margin-bottom": "8px" } }, h("h2", {}, found.title), found.label && h("span", { class: "quiet" }, "label ", chip(found.label)), h("span", { class: "quiet" }, "answer ", chip(found.units[0])), verdict(right)),
      probabilities(found, { limit: MOST_PROBABLE }),
      found.units.length > MOST_PROBABLE && h("details", { class: "small" }, h("summary", { class: "quiet" }, `all ${found.units.length} outputs`), probabilities(found, { limit: found.units.length })),
      h("div", { class: "line", style: { "margin-top": "10px" } }, h("a", { href: link("edit", { input: found.input }) }, "Edit the memory behind it"), copyLink()))));
}

const targets = (found, target, choose) => h("label", { class: "check" }, "towards", h("select", { "aria-label": "Towards which output", onchange: (event) => choose(event.target.value) },
  [...found.units].sort((a, b) => a.unit - b.unit).map((unit) => h("option", { value: unit.unit, selected: unit.unit === target }, `${unit.name} (${number(unit.logit)})`))));

function layerCard(sources, { run, found, layer }) {
  const word = WORDS[sources.kind];
  const unit = found.units.find((one) => one.unit === sources.target);
  return [
    sources.kind === "contribution" && h("p", { class: "quiet small" }, sources.exact ? "Exact: initial part + classes = the output." : "First order: the remainder is what that leaves out."),
    sources.parts && [h("h3", {}, `What adds up to ${unit ? unit.name : "the output"}`), split(sources, unit)],
    sources.highest.length > 0 && [h("h3", {}, sources.kind === "attention" ? "Looks most at" : "Pushes it up most"), examples(sources.highest, layer, word)],
    sources.lowest.length > 0 && [h("h3", {}, "Pushes it down most"), examples(sources.lowest, layer, word)],
    sources.totals.length > 0 && !sources.parts && [h("h3", {}, `Total ${word} by ${sources.grouped_by}`), bars(sources.totals.map((total) => ({ name: total.name, value: total.total, colour: colourOf(total.colour), strong: total.total === Math.max(...sources.totals.map((one) => one.total)) })), { caption: `Total ${word} of each class` })],
    sources.curves.length > 0 && [h("h3", {}, "The best 500 slots of each class"), curves(sources, word)],
    sources.time && [h("h3", {}, "When it was written, and the sum so far (line)"), timeline(sources.time, word)],
    !sources.highest.length && !sources.time && h("p", { class: "quiet small" }, "This run keeps totals only, so single examples cannot be shown."),
  ];
}

function split(sources, unit) {
  const lines = [{ name: sources.parts.name, value: sources.parts.initial, colour: "var(--faint)" }];
  if (sources.totals.length) lines.push(...sources.totals.map((total) => ({ name: total.name, value: total.total, colour: colourOf(total.colour) })));
  else lines.push({ name: "all slots", value: sources.parts.slots, colour: "var(--bar)" });
  const so = lines.reduce((sum, line) => sum + line.value, 0);
  lines.push({ name: "remainder", value: sources.parts.target - so, colour: "var(--minus)" });
  return adding(lines, { name: unit ? `output ${unit.name}` : "output", value: sources.parts.target, colour: unit ? colourOf(unit.colour) : "var(--bar)" }, { caption: "Parts that add up to the output" });
}

export function examples(list, layer, word) {
  return h("ol", { class: "sources" }, list.map((source) => h("li", {}, h("a", {
    href: isReport ? undefined : link("sample", { key: source.key.map(String), layer: layer.name }),
    "aria-label": `Training example ${source.title}${source.label ? `, label ${source.label.name}` : ""}, ${word} ${number(source.weight)}, strongest at step ${source.step}, ${visits(source.visits)}`,
    title: `training example ${source.title}\n${word} ${number(source.weight, 5)}, summed over ${visits(source.visits)}\nstrongest at step ${source.step}`,
  }, sample(source.shown, ""), h("span", { class: "told", style: { display: "block" }, "aria-hidden": "true" },
    source.label && [chip(source.label), " "], h("b", {}, number(source.weight)), h("span", { class: "quiet" }, `step ${source.step}`), " ", h("span", { class: "quiet" }, visits(source.visits)))))));
}
