// Suspects: training examples whose label is perhaps wrong.
import { h, fill, problem, number, whole } from "./dom.js";
import { get, post } from "./api.js";
import { go, link, changed } from "./state.js";
import { sample, chip, follow } from "./parts.js";

export const title = "Suspects";
const EACH = 40;
let ranked = false;

export async function show(place, { run, parameters, signal }) {
  const offset = Number(parameters.get("offset") ?? 0);
  const list = h("div", {});
  fill(place, h("div", { class: "stack" }, h("div", {}, h("h1", {}, "Suspects"), h("p", { class: "quiet" }, "Training examples ranked by how large their error signals stayed, visit after visit: how much the model disagreed with their label while it learned. High up are mislabelled, ambiguous and rare examples. Beside the label: what the model said.")), list));
  if (run.suspects) { fill(list, h("p", { class: "note" }, run.suspects)); return; }
  const finished = (found) => { ranked = true; fill(list, table(found, offset, parameters)); };
  if (ranked) finished(await get("/api/suspects", { offset: offset || null, limit: EACH }, signal));
  else await follow(await post("/api/jobs", { kind: "suspects" }), list, { signal, finished: async (found) => finished(offset ? await get("/api/suspects", { offset, limit: EACH }, signal) : found) });
}

function table(found, offset, parameters) {
  const set = (value) => go("suspects", changed(parameters, { offset: value || null }));
  return [h("ul", { class: "grid", style: { "grid-template-columns": "repeat(auto-fill, minmax(104px, 1fr))", gap: "12px" } }, found.suspects.map((one) => h("li", {}, h("a", { href: link("sample", { key: one.key.map(String) }), "aria-label": `Rank ${one.rank}: training example ${one.title}, label ${one.label?.name}, score ${number(one.score)}` },
    sample(one.shown, ""), h("span", { class: "small", style: { display: "block", "margin-top": "3px" }, "aria-hidden": "true" }, h("span", { class: "quiet" }, `#${one.rank} `), chip(one.label), one.said && [" → ", chip(one.said)], h("br"), h("b", {}, number(one.score)), one.probability !== null && h("span", { class: "quiet", style: { "white-space": "nowrap" } }, ` p ${number(one.probability, 2)}`)))))),
  h("div", { class: "line", style: { "margin-top": "14px" } }, h("button", { type: "button", disabled: offset === 0, onclick: () => set(Math.max(0, offset - EACH)) }, "← Before"), h("span", { class: "quiet small" }, `${whole(offset + 1)} to ${whole(offset + found.suspects.length)} of ${whole(found.of)}`), h("button", { type: "button", disabled: offset + EACH >= found.of, onclick: () => set(offset + EACH) }, "After →"))];
}
