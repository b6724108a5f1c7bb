// Text: a prompt with tokens to click on; for the chosen one, the passages of the training text that a layer reads.
import { h, fill, problem, skeleton, number, visits, percent, say } from "./dom.js";
import { get, isReport, post } from "./api.js";
import { go, changed } from "./state.js";
import { bars, choice, copyLink, follow, refused } from "./parts.js";

export const title = "Text";
const TOKENS = 40;
const FEW_LAYERS = 6;
let writing = false;

export async function show(place, { run, parameters, signal }) {
  if (!run.text) { fill(place, h("p", { class: "note" }, "This run has no text.")); return; }
  const prompt = parameters.get("prompt") ?? run.text.prompt;
  const layers = run.layers.filter((layer) => layer.attends);
  const layer = layers.find((one) => one.name === parameters.get("layer")) ?? layers.find((one) => one.gates.length) ?? layers[layers.length - 1];
  const view = run.views.find((one) => one.kind === parameters.get("kind")) ?? run.views[0];
  const { kind } = view;
  const position = parameters.has("position") ? Number(parameters.get("position")) : null;
  const made = Number(parameters.get("made") ?? 0);
  const set = (changes) => go("text", changed(parameters, changes));
  const field = h("textarea", { id: "prompt", rows: 3, maxlength: run.text.longest, spellcheck: "false" });
  field.value = prompt;
  const ask = () => set({ prompt: field.value, position: null, target: null, made: null });
  field.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); ask(); } });
  const tokens = h("div", {}, skeleton(60)), following = h("div", {}, skeleton(160)), passages = h("div", {}, skeleton(240));
  fill(place, h("h1", { class: "hidden" }, "Text"), h("div", { class: "stack" },
    h("section", { class: "card", "aria-label": "Prompt" },
      run.text.prompts.length > 1 && choice("Prompts", run.text.prompts.map((one) => ({ value: one, name: one })), prompt, (value) => set({ prompt: value, position: null, target: null })),
      !isReport && h("label", { class: "field", for: "prompt" }, "Prompt"), !isReport && field,
      !isReport && h("div", { class: "line", style: { "margin-top": "8px" } }, h("button", { type: "button", class: "main", onclick: ask }, "Ask"),
        h("button", { type: "button", onclick: () => { writing = !writing; if (writing) write(1); else show(place, { run, parameters, signal }); } }, writing ? "Stop" : `Go on for ${TOKENS} tokens`), h("button", { type: "button", onclick: () => write(1, true) }, "One token"), copyLink()),
      h("h3", {}, isReport ? "Its tokens; this report is about the last one" : "Choose a token"), tokens),
    h("div", { class: "beside" }, h("section", { class: "card", "aria-label": "What may follow" }, h("h2", {}, "What may follow"), following),
      h("section", { class: "card stack", style: { gap: "10px" }, "aria-label": "Passages" }, h("h2", {}, "Where in the training text it reads"),
        h("div", { class: "line" }, choice("How to look at it", run.views.map((one) => ({ value: one.kind, name: one.name, missing: one.missing })), kind, (value) => set({ kind: value })),
          layers.length > 1 && layerChoice(layers, layer, (value) => set({ layer: value, gate: null, part: null }))),
        layer.gates.length > 0 && kind !== "influence" && h("div", { class: "line" },
          choice("Part of the keys", ["both", "input", "recurrent"].map((name) => ({ value: name, name })), parameters.get("part") ?? "both", (value) => set({ part: value === "both" ? null : value })),
          kind === "contribution" && choice("Gate", [{ value: "", name: "all gates" }, ...layer.gates.map((name) => ({ value: name, name }))], parameters.get("gate") ?? "", (value) => set({ gate: value || null }))),
        h("p", { class: "note" }, view.sentence), passages))));
  let found;
  try { found = await get("/api/text", { prompt, position }, signal); } catch (error) { if (error.name !== "AbortError") { writing = false; fill(tokens, problem(error)); fill(following); fill(passages); } return; }
  const target = parameters.has("target") ? Number(parameters.get("target")) : found.following[0].unit;
  fill(tokens, h("div", { class: "tokens", role: "group", "aria-label": "Tokens" }, found.tokens.map((token) => h("button", {
    type: "button", disabled: isReport, "aria-pressed": String(token.position === found.position), class: token.position >= found.tokens.length - made ? "made" : "",
    title: token.probability === null ? undefined : `the model gave it ${percent(token.probability)}`, "aria-label": `token ${token.position}: ${visible(token.text)}`, onclick: () => set({ position: token.position, target: null }),
  }, visible(token.text)))));
  fill(following, bars(found.following.map((one) => ({ name: visible(one.text), value: one.probability, told: percent(one.probability), strong: kind !== "attention" && one.unit === target })), { caption: "Probability of the next token", from: 1 }),
    kind !== "attention" && !isReport && h("label", { class: "field", style: { "margin-top": "10px" } }, `${view.name} towards`, h("select", { onchange: (event) => set({ target: event.target.value }) }, found.following.map((one) => h("option", { value: one.unit, selected: one.unit === target }, visible(one.text))))));
  const asked = { prompt, position, layer: layer.name, kind, target: kind === "contribution" ? target : null, gate: kind === "contribution" ? parameters.get("gate") : null, part: layer.gates.length ? parameters.get("part") : null };
  const told = (sources) => {
    say(`${sources.highest.length} passages for the token ${visible(sources.token)}`);
    fill(passages, h("h3", {}, kind === "attention" ? `At ${quoted(sources.token)} it looks most at` : `Pushes ${quoted(sources.towards)} up most`), list(sources.highest),
      sources.lowest.length > 0 && [h("h3", {}, `Pushes ${quoted(sources.towards)} down most`), list(sources.lowest)]);
  };
  try {
    if (view.missing) fill(passages, refused(view));
    else if (kind !== "influence") told(await get("/api/passages", asked, signal));
    else await follow(await post("/api/jobs", { kind, prompt, position, layer: layer.name, target }), passages, { signal, finished: told });
  } catch (error) { if (error.name !== "AbortError") fill(passages, problem(error)); }
  if (writing && !signal.aborted) write(made + 1);

  function write(count, once = false) {
    if (!once && count > TOKENS) { writing = false; say("Done."); return; }
    get("/api/text", { prompt }, signal).then((last) => {
      const next = sampled(last.following);
      if (next.prompt.length > run.text.longest) { writing = false; return; }
      go("text", changed(parameters, { prompt: next.prompt, position: null, target: null, made: once ? made + 1 : count }), { replace: !once });
    }).catch((error) => { if (error.name !== "AbortError") { writing = false; fill(tokens, problem(error)); } });
  }
}

// One of the likely tokens, by their probabilities.
function sampled(following) {
  const total = following.reduce((sum, one) => sum + one.probability, 0);
  let left = Math.random() * total;
  return following.find((one) => (left -= one.probability) <= 0) ?? following[0];
}

// Side by side if they are few; a Transformer has dozens.
function layerChoice(layers, chosen, change) {
  if (layers.length <= FEW_LAYERS) return choice("Layer", layers.map((one) => ({ value: one.name, name: one.name })), chosen.name, change);
  return h("label", { class: "field" }, "Layer", h("select", { onchange: (event) => change(event.target.value) },
    layers.map((one) => h("option", { value: one.name, selected: one.name === chosen.name }, one.name))));
}

const visible = (text) => (text === "\n" ? "↵" : text === " " ? "␣" : text);
const flowing = (text) => text.replace(/\s*\n\s*/g, " ↵ ");
const quoted = (text) => `“${visible(text)}”`;
const list = (passages) => h("ol", { class: "passages" }, passages.map((one) => h("li", {},
  h("div", { class: "line small" }, h("b", {}, number(one.weight)), one.excerpt.title && h("span", {}, one.excerpt.title), h("span", { class: "quiet" }, `position ${one.excerpt.position.toLocaleString("en")}, ${visits(one.visits)}`)),
  h("p", { class: "passage" }, flowing(one.excerpt.before), h("mark", {}, visible(one.excerpt.token)), flowing(one.excerpt.after)))));
