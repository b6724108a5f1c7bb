// The JSON endpoints, as OpenAPI describes them, for scripts.
import { h, fill } from "./dom.js";
import { get } from "./api.js";

export const title = "API";

export async function show(place, { signal }) {
  const described = await get("/openapi.json", {}, signal);
  fill(place, h("div", { class: "stack" }, h("div", {}, h("h1", {}, "For scripts"), h("p", { class: "quiet" }, "Everything that this page shows comes from these addresses, as JSON. ", h("a", { href: "/openapi.json" }, "/openapi.json"), " describes them in full. Scripts send the token of the address that was printed: ", h("code", {}, "Authorization: Bearer …"), ".")),
    Object.entries(described.paths).flatMap(([path, methods]) => Object.entries(methods).map(([method, told]) => h("section", { class: "card" }, h("h2", {}, h("code", {}, `${method.toUpperCase()} ${path}`)), h("p", { style: { "margin-top": "6px" } }, told.description ?? told.summary),
      (told.parameters ?? []).length > 0 && h("dl", { class: "facts" }, told.parameters.map((one) => [h("dt", {}, h("code", {}, one.name), one.required ? " (needed)" : ""), h("dd", {}, one.description ?? "")])))))));
}
