// Memory edit: some of what was learned is switched off, and the prediction changes at once.
import { h, fill, problem, skeleton, number, whole, percent, say } from "./dom.js";
import { get, post, isReport } from "./api.js";
import { go, link, changed } from "./state.js";
import { sample, chip, bars, follow, copyLink } from "./parts.js";
import { chooser } from "./chooser.js";
import { colourOf } from "./colours.js";

export const title = "Memory edit";
export const SENTENCE = "This edits memory: everything else stays as it was recorded. It does not predict what retraining without these examples would give.";

// SQL, as query/conditions.py reads it: names in double quotes, text in single ones.
const identifier = (name) => `"${name.replaceAll('"', '""')}"`;
const literal = (value) => (typeof value === "string" ? `'${value.replaceAll("'", "''")}'` : String(value));
const equal = (column, value) => (value === null ? `${identifier(column)} IS NULL` : `${identifier(column)} = ${literal(value)}`);

const TAKES_LONG = 409;

export function condition(run, parameters) {
  const parts = [];
  const off = new Map();
  for (const one of parameters.getAll("off")) {
    const [column, value] = JSON.parse(one);
    off.set(column, [...(off.get(column) ?? []), value]);
  }
  for (const [column, values] of off) {
    const some = values.filter((value) => value !== null);
    if (some.length) parts.push(some.length === 1 ? equal(column, some[0]) : `${identifier(column)} IN (${some.map(literal).join(", ")})`);
    if (some.length < values.length) parts.push(equal(column, null));
  }
  const [from, to] = [parameters.get("from"), parameters.get("to")];
  if (from !== null || to !== null) parts.push(`step BETWEEN ${Number(from ?? 0)} AND ${Number(to ?? run.steps)}`);
  for (const one of parameters.getAll("example")) parts.push(`(${JSON.parse(one).map((value, at) => equal(run.by[at], value)).join(" AND ")})`);
  if (parameters.get("sql")) parts.push(parts.length ? `(${parameters.get("sql")})` : parameters.get("sql"));
  return parts.join(" OR ");
}

export async function show(place, context) {
  const { run, parameters, signal, refresh } = context;
  if (run.edits) { fill(place, h("p", { class: "note" }, h("b", {}, "Memory cannot be edited here: "), `${run.edits}.`)); return; }
  const input = parameters.get("input");
  if (!input) {
    const first = (await get("/api/examples", { limit: 40 }, signal)).examples[0];
    if (!first) { fill(place, h("p", { class: "note" }, "There are no test examples. Give them with dual.explore(test=…).")); return; }
    go("edit", changed(parameters, { input: first.input }), { replace: true });
    return;
  }
  const drop = condition(run, parameters);
  const result = h("div", { class: "stack result" }, skeleton(260)), accuracy = h("div", {});
  fill(place, h("h1", { class: "hidden" }, "Memory edit"), h("div", { class: "beside" }, chooser("edit", context),
    h("div", { class: "stack" }, switches(run, parameters, drop, signal, refresh), result, accuracy)));
  if (!drop) {
    const found = await get("/api/prediction", { input }, signal);
    fill(result, h("section", { class: "card" }, h("div", { class: "input" }, sample(found.shown, found.title), h("div", {}, title_(found), beforeAfter(found, found), h("p", { class: "quiet small" }, "Switch something off to see the answer change.")))));
    return;
  }
  const finished = (change) => {
    say(`Without that memory the answer is ${change.after.units[0].name}, ${percent(change.after.units[0].probability)}; before: ${change.before.units[0].name}`);
    fill(result, changeCard(change));
    if (!isReport) correct(accuracy, drop, signal);
  };
  try {
    finished(await get("/api/edit", { input, drop }, signal));
  } catch (error) {
    if (error.status === TAKES_LONG) await asJob({ kind: "edit", input, drop }, result, { signal, finished });
    else if (error.name !== "AbortError") fill(result, problem(error));
  }
}

async function asJob(work, place, options) {
  try {
    await follow(await post("/api/jobs", work), place, options);
  } catch (error) { if (error.name !== "AbortError") fill(place, problem(error)); }
}

const title_ = (found) => h("div", { class: "line", style: { "margin-bottom": "8px" } }, h("h2", {}, found.title), found.label && h("span", { class: "quiet" }, "label ", chip(found.label)));

function switches(run, parameters, drop, signal, refresh) {
  const off = parameters.getAll("off");
  const set = (changes) => go("edit", changed(parameters, changes));
  const slow = run.groups.filter((group) => !group.fast).map((group) => group.column);
  const building = h("div", {});
  const [from, to] = [h("input", { type: "number", min: 0, max: run.steps, value: parameters.get("from") ?? "", placeholder: "0" }), h("input", { type: "number", min: 0, max: run.steps, value: parameters.get("to") ?? "", placeholder: String(run.steps - 1) })];
  const sql = h("input", { type: "text", value: parameters.get("sql") ?? "", placeholder: `${run.label || "step"} = 7 AND step > 100`, spellcheck: "false", maxlength: 1000, onchange: (event) => set({ sql: event.target.value }) });
  const one = h("input", { type: "text", placeholder: run.by.join(" / "), maxlength: 200 });
  const addOne = () => { const key = one.value.split("/").map((part) => part.trim()); if (key.length === run.by.length && key[0] !== "") set({ example: [...parameters.getAll("example"), JSON.stringify(key.map((part) => (/^-?\d+$/.test(part) ? Number(part) : part)))] }); else { one.setCustomValidity(`Give ${run.by.join(" / ")}.`); one.reportValidity(); one.setCustomValidity(""); } };
  return h("section", { class: "card", "aria-label": "What is switched off" }, h("h2", {}, "Switch memory off"), h("p", { class: "note", style: { "margin-top": "10px" } }, SENTENCE),
    run.groups.map((group) => [h("h3", {}, group.column), h("div", { class: "toggles", role: "group", "aria-label": `Switch off by ${group.column}` }, group.values.map((value) => {
      const key = JSON.stringify([group.column, value.value]);
      const isOff = off.includes(key);
      return h("button", { type: "button", "aria-pressed": String(isOff), "aria-label": `${isOff ? "Switch on" : "Switch off"} ${group.column} ${value.name}`, onclick: () => set({ off: isOff ? off.filter((other) => other !== key) : [...off, key] }) },
        group.column === run.label && h("span", { class: "dot", style: { background: colourOf(value.colour) } }), value.name);
    }))]),
    !isReport && h("div", { class: "line end", style: { "margin-top": "14px" } },
      h("label", { class: "field", style: { width: "110px" } }, "From step", from), h("label", { class: "field", style: { width: "110px" } }, "to step", to),
      h("button", { type: "button", onclick: () => set({ from: from.value, to: to.value }) }, "Switch steps off"),
      run.by.length > 0 && [h("label", { class: "field", style: { width: "170px" } }, "Training example", one), h("button", { type: "button", onclick: addOne }, "Switch it off")]),
    parameters.getAll("example").length > 0 && h("div", { class: "toggles", style: { "margin-top": "10px" } }, parameters.getAll("example").map((key) => h("button", { type: "button", "aria-pressed": "true", "aria-label": `Switch on training example ${JSON.parse(key).join(" ")}`, onclick: () => set({ example: parameters.getAll("example").filter((other) => other !== key) }) }, `example ${JSON.parse(key).join(" ")} ×`))),
    !isReport && h("details", { style: { "margin-top": "12px" }, open: Boolean(parameters.get("sql")) }, h("summary", { class: "small" }, "As a condition (SQL over the columns and step)"), h("label", { class: "field", style: { "margin-top": "8px" } }, "Also without rows where", sql)),
    drop && h("p", { class: "small", style: { "margin-top": "12px" } }, h("span", { class: "quiet" }, "Dropped: "), h("code", {}, drop)),
    h("div", { class: "line" }, drop && h("button", { type: "button", onclick: () => go("edit", { input: parameters.get("input") }) }, "Everything back on"), copyLink()),
    slow.length > 0 && !isReport && ["slots", "rows"].includes(run.keep) && h("div", { style: { "margin-top": "12px" } }, h("p", { class: "small quiet" }, "Edits read slots. With group totals, kept in the run's folder, those by a column take milliseconds."),
      h("div", { class: "line" }, slow.map((column) => h("button", { type: "button", onclick: async () => { try { await follow(await post("/api/jobs", { kind: "totals", by: [column] }), building, { signal, finished: refresh, lasting: true }); } catch (error) { fill(building, problem(error)); } } }, `Build totals by ${column}`))), building));
}

function changeCard(change) {
  const { before, after } = change;
  const same = before.answer === after.answer;
  return h("section", { class: "card", "aria-label": "Before and after" }, h("div", { class: "input" }, sample(before.shown, before.title), h("div", {}, title_(before),
    h("p", { style: { "font-size": "17px" } }, chip(before.units[0]), ` ${percent(before.units[0].probability)} `, h("span", { "aria-label": "becomes" }, "→"), " ", chip(after.units[0]), ` ${percent(after.units[0].probability)} `, h("span", { class: same ? "quiet" : "wrong" }, same ? "the same answer" : "another answer")),
    beforeAfter(before, after), h("p", { class: "quiet small" }, `${whole(change.dropped_rows)} of ${whole(change.rows)} rows dropped, in ${Math.round(1000 * change.seconds)} ms${change.fast ? ", from group totals" : ""}.`))));
}

function beforeAfter(before, after) {
  const was = new Map(before.units.map((unit) => [unit.unit, unit.probability ?? 0]));
  const units = [...after.units].sort((a, b) => Math.max(b.probability ?? 0, was.get(b.unit) ?? 0) - Math.max(a.probability ?? 0, was.get(a.unit) ?? 0)).slice(0, 10).sort((a, b) => a.unit - b.unit);
  return pairs(units.map((unit) => ({ name: unit.name, before: was.get(unit.unit) ?? 0, after: unit.probability ?? 0, colour: colourOf(unit.colour), strong: unit.unit === after.answer })), "Probability of each output before and after");
}

// Two bars a line, from 0 to 1: before (faint) and after.
function pairs(lines, caption) {
  const bar = (value, colour, faint) => h("div", { class: "track half" }, h("i", { style: { left: 0, width: `${100 * value}%`, background: colour, opacity: faint ? 0.4 : 1 } }));
  return h("table", { class: "bars pairs" }, h("caption", { class: "hidden" }, caption),
    h("thead", {}, h("tr", {}, h("th", {}), h("th", {}), ["before", "after"].map((name) => h("th", { scope: "col", class: "number" }, name)))),
    h("tbody", {}, lines.map((line) => h("tr", { class: line.strong ? "strong" : "" }, h("th", { scope: "row", title: line.name }, line.name), h("td", {}, bar(line.before, line.colour, true), bar(line.after, line.colour, false)), h("td", { class: "number" }, percent(line.before)), h("td", { class: "number" }, percent(line.after))))));
}

async function correct(place, drop, signal) {
  fill(place, skeleton(120));
  try {
    const found = await get("/api/accuracy", { drop }, signal);
    fill(place, h("section", { class: "card" }, h("h2", {}, "The whole test set"), h("p", { class: "quiet small" }, `Right answers, of ${whole(found.examples)} test examples${found.examples < found.of ? ` spread over all ${whole(found.of)}` : ""}: ${percent(found.before)} before, `, h("b", {}, `${percent(found.after)} after.`)),
      pairs(found.classes.map((one) => ({ name: one.name, before: one.before, after: one.after, colour: colourOf(one.colour) })), "Right answers by class before and after")));
  } catch (error) { if (error.name !== "AbortError") fill(place); }
}
