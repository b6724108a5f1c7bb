// Choosing an input: test examples with filters, or a drawing.
import { h, fill, problem, skeleton, whole } from "./dom.js";
import { get, isReport } from "./api.js";
import { go, link, changed } from "./state.js";
import { sample } from "./parts.js";
import { pad } from "./draw.js";

const EACH = 40;

// view: where a choice leads. Other parameters of the address stay as they are.
export function chooser(view, { run, parameters, signal }) {
  const grid = h("div", {}, skeleton(220));
  const offset = Number(parameters.get("offset") ?? 0);
  const set = (changes) => go(view, changed(parameters, { offset: null, ...changes }));
  const filters = {
    label: parameters.get("of"), right: parameters.get("right"), number: parameters.get("number"), part: parameters.get("part"), shuffle: parameters.get("shuffle"), offset: offset || null, limit: EACH,
  };
  const select = (name, key, options) => h("label", { class: "field" }, name, h("select", { onchange: (event) => set({ [key]: event.target.value }) },
    options.map(([value, words]) => h("option", { value, selected: (parameters.get(key) ?? "") === value }, words))));
  const classes = run.groups.find((group) => group.column === run.label)?.values ?? run.units;
  const search = h("input", { type: "number", min: 0, inputmode: "numeric", value: parameters.get("number") ?? "", placeholder: "any", onchange: (event) => set({ number: event.target.value }) });
  const load = (found) => {
    const items = found.examples.map((example) => h("li", {}, h("a", {
      href: link(view, changed(parameters, { input: example.input, target: null })), "aria-current": example.input === parameters.get("input") ? "true" : undefined,
      "aria-label": `${example.title}${example.label ? `, label ${example.label.name}` : ""}${example.answer ? `, answer ${example.answer.name}` : ""}${example.right === false ? ", wrong" : ""}`,
    }, framed(example), h("span", { class: "under", "aria-hidden": "true" }, example.right === false ? [h("span", { class: "wrong" }, example.label.name), h("span", { class: "wrong" }, `→${example.answer.name}`)] : h("span", { class: "quiet" }, example.label?.name ?? example.answer?.name)))));
    const more = found.found > offset + EACH;
    fill(grid, items.length ? h("ul", { class: "grid", "aria-label": "Test examples" }, items) : h("p", { class: "quiet" }, "No test example fits."),
      !isReport && h("div", { class: "line", style: { "margin-top": "10px", "justify-content": "space-between" } },
        h("button", { type: "button", disabled: offset === 0, "aria-label": "Earlier examples", onclick: () => set({ offset: Math.max(0, offset - EACH) || null }) }, "←"),
        h("span", { class: "quiet small" }, `${whole(found.found)} fit`),
        h("button", { type: "button", disabled: !more, "aria-label": "More examples", onclick: () => set({ offset: offset + EACH }) }, "→")));
  };
  get("/api/examples", filters, signal).then(load).catch((error) => { if (error.name !== "AbortError") fill(grid, problem(error)); });
  return h("aside", { class: "stack chooser", "aria-label": "Choose an input" },
    run.tests > 0 && h("section", { class: "card" }, h("h2", {}, "Test examples"),
      !isReport && h("div", { class: "stack", style: { gap: "8px", margin: "10px 0" } },
        h("div", { style: { display: "grid", "grid-template-columns": "1fr 1fr", gap: "8px" } },
          select("Class", "of", [["", "all"], ...classes.map((one) => [String(one.value), one.name])]),
          select("Answer", "right", [["", "all"], ["true", "right"], ["false", "wrong"]]),
          run.parts.length > 1 && select("Test set", "part", [["", "all"], ...run.parts.map((name) => [name, name])]),
          h("label", { class: "field" }, "Number", search)),
        h("div", { class: "line" }, h("button", { type: "button", onclick: () => set({ shuffle: 1 + Math.floor(Math.random() * 1e6) }) }, "Shuffle"),
          h("button", { type: "button", onclick: () => random(run, filters, view, parameters) }, "Random one"),
          ["of", "right", "number", "part", "shuffle"].some((key) => parameters.get(key)) && h("button", { type: "button", onclick: () => set({ of: null, right: null, number: null, part: null, shuffle: null }) }, "Reset"))),
      grid),
    run.draws && !isReport && h("details", { class: "card", open: matchMedia("(min-width: 861px)").matches || parameters.get("input")?.startsWith("draw:") }, h("summary", {}, h("h2", { style: { display: "inline" } }, "Draw one")), pad(parameters.get("input"), (input) => go(view, changed(parameters, { input, target: null })))));
}

function framed(example) {
  const shown = sample(example.shown, "");
  if (example.right === false) shown.classList?.add("mark-wrong");
  return shown;
}

async function random(run, filters, view, parameters) {
  const found = await get("/api/examples", { ...filters, shuffle: Math.floor(Math.random() * 1e6), offset: null, limit: 1 });
  if (found.examples.length) go(view, changed(parameters, { input: found.examples[0].input, target: null }));
}
