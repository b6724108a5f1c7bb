// The run: what was recorded, how exactly, and what happened while it was trained.
import { h, fill, problem, skeleton, number, whole, percent, bytes } from "./dom.js";
import { get, post, isReport } from "./api.js";
import { bars, follow } from "./parts.js";
import { loss } from "./charts.js";
import { colourOf } from "./colours.js";

export const title = "Run";
const KEEP = { slots: "every slot: keys and error signals", rows: "the gradients of rows, where these are smaller than their slots", keys: "keys only", totals: "totals only" };

export async function show(place, { run, signal }) {
  const certificate = h("div", {}), log = h("div", {}, skeleton(240)), rows = h("div", {});
  fill(place, h("div", { class: "stack" },
    h("div", {}, h("h1", {}, run.title), h("p", { class: "quiet" }, `${run.collected ? "Collected" : "Recorded"} with dualform ${run.version}; stored in ${run.dtype}; keeps ${KEEP[run.keep] ?? run.keep}.`),
      run.collected && h("p", { class: "note" }, `This run was ${run.collected}: attention can be asked, and influence, which is an estimate; what training wrote into the weights is not known.`)),
    h("div", { class: "tiles" },
      tile(whole(run.steps), run.collected ? "batches" : "steps of training"), tile(whole(run.rows), `rows, a sample in a ${run.collected ? "batch" : "step"} each`),
      tile(whole(Math.max(0, ...run.layers.map((layer) => layer.slots))), "slots in the largest layer"),
      run.samples > 0 && run.by.length > 0 && tile(whole(run.samples), "training examples"),
      tile(bytes(run.bytes), "on the disk"), run.accuracy !== null && tile(percent(run.accuracy), `right of ${whole(run.tests)} test examples`)),
    Object.entries(run.inexact).map(([name, why]) => h("p", { class: "problem" }, `Layer ${name} is inexact ${why}`)),
    h("section", { class: "card", "aria-labelledby": "certificate" }, h("h2", { id: "certificate" }, "Certificate"),
      h("p", { class: "quiet small" }, run.collected ? "Nothing was trained here, so there is no sum to compare with the weights. The slots of each batch should explain its gradient." : "Every parameter should be its initial part plus what its slots wrote. Training rounds at every step, so a small gap remains; it is measured, not assumed."), certificate),
    h("div", { class: "halves" },
      h("section", { class: "card", "aria-labelledby": "log" }, h("h2", { id: "log" }, "Recorded over the steps"), log),
      h("section", { class: "card", "aria-labelledby": "rows" }, h("h2", { id: "rows" }, "Rows by column"), rows)),
    h("section", { class: "card", "aria-labelledby": "layers" }, h("h2", { id: "layers" }, "Layers"), layers(run))));
  verification(certificate, run, signal);
  get("/api/log", {}, signal).then((found) => fill(log, found.series.length ? loss(found.series) : h("p", { class: "quiet" }, "Nothing was logged: recorder.log(loss=…) would show here."))).catch((error) => shown(log, error));
  byColumn(rows, run, signal);
}

const tile = (value, words) => h("div", { class: "tile" }, h("b", {}, value), h("span", {}, words));
const shown = (place, error) => { if (error.name !== "AbortError") fill(place, problem(error)); };

function layers(run) {
  return h("div", { class: "scroll" }, h("table", { class: "lines" },
    h("thead", {}, h("tr", {}, ["Layer", "Kind"].map((name) => h("th", { scope: "col" }, name)), ["In", "Out", "Slots"].map((name) => h("th", { scope: "col", class: "number" }, name)))),
    h("tbody", {}, run.layers.map((layer) => h("tr", {}, h("th", { scope: "row" }, layer.name), h("td", {}, layer.kind + (layer.attends ? "" : ", elementwise")),
      [layer.d_in, layer.d_out, layer.slots].map((value) => h("td", { class: "number" }, whole(value)))),
    )), ), Object.entries(run.left_out).map(([name, why]) => h("p", { class: "quiet small" }, `Not recorded: ${name} (${why})`)));
}

let verified = null;
const PASSING = { pass: "right", gradients: "quiet", rounded: "quiet" };
const SMALL = 50_000;
const KEYS_ONLY = "This run keeps keys only: without error signals there is nothing to compare the weights with.";
function verification(place, run, signal) {
  const table = (found) => {
    verified = found;
    fill(place, h("p", { class: found.passed ? "right" : "wrong" }, found.passed ? (run.collected ? `Verified: in all ${whole(found.step)} batches, the slots explain every gradient.` : `Verified after step ${whole(found.step)}: every parameter is what its slots say.`) : "Not every parameter is what its slots say."),
      h("div", { class: "scroll" }, h("table", { class: "lines certificate" },
        h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Parameter"), ["Gap", "Rounding floor", "Moved by"].map((name) => h("th", { scope: "col", class: "number" }, name)), h("th", { scope: "col" }, "In words"))),
        h("tbody", {}, found.lines.map((line) => h("tr", {}, h("th", { scope: "row" }, line.parameter), [line.gap, line.floor, line.movement].map((value) => h("td", { class: "number" }, number(value, 2))),
          h("td", {}, h("span", { class: PASSING[line.verdict] ?? "wrong" }, `${line.verdict}: `), line.words)))))));
  };
  if (isReport) { get("/api/jobs/verify").then((job) => (job.result ? table(job.result) : fill(place, h("p", { class: "note" }, KEYS_ONLY)))).catch((error) => shown(place, error)); return; }
  if (verified) { table(verified); return; }
  const start = async () => { try { await follow(await post("/api/jobs", { kind: "verify" }), place, { signal, finished: table }); } catch (error) { shown(place, error); } };
  if (run.keep === "keys") fill(place, h("p", { class: "note" }, KEYS_ONLY));
  else if (run.rows <= SMALL) start();
  else fill(place, h("button", { type: "button", class: "main", onclick: start }, "Verify now"));
}

function byColumn(place, run, signal) {
  const names = Object.entries(run.columns).filter(([, told]) => told.endsWith("row")).map(([name]) => name);
  if (!names.length) { fill(place, h("p", { class: "quiet" }, "No columns were recorded: recorder.batch(sample_id=…, label=…) would show here.")); return; }
  const found = h("div", {}, skeleton(200));
  const load = (column) => get("/api/rows", { column }, signal).then((counted) => fill(found,
    bars(counted.counts.map((count) => ({ name: count.name, value: count.rows, told: whole(count.rows), colour: column === run.label ? colourOf(count.colour) : "var(--bar)" })), { caption: `Rows by ${column}` }),
    counted.groups > counted.counts.length && h("p", { class: "quiet small" }, `The ${counted.counts.length} largest of ${whole(counted.groups)} groups.`))).catch((error) => shown(found, error));
  const first = run.label || names[0];
  const select = h("select", { onchange: () => load(select.value) }, names.map((name) => h("option", { value: name, selected: name === first }, name)));
  fill(place, h("label", { class: "field" }, "Column", select), h("div", { style: { "margin-top": "10px" } }, found));
  load(first);
}
