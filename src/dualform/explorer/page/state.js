// The whole state is in the address, after the #, so that a view can be shared as a link.

export function read() {
  const [view, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { view: view || "run", parameters: new URLSearchParams(query ?? "") };
}

export function link(view, parameters = {}) {
  const query = parameters instanceof URLSearchParams ? parameters : new URLSearchParams();
  if (!(parameters instanceof URLSearchParams)) {
    for (const [name, value] of Object.entries(parameters)) {
      if (value === undefined || value === null || value === "" || value === false) continue;
      for (const one of Array.isArray(value) ? value : [value]) query.append(name, one);
    }
  }
  const text = query.toString();
  return `#/${view}${text ? `?${text}` : ""}`;
}

// The same view with some parameters changed: null removes, an array gives several.
export function changed(parameters, changes) {
  const copy = new URLSearchParams(parameters);
  for (const [name, value] of Object.entries(changes)) {
    copy.delete(name);
    if (value === null || value === undefined || value === "" || value === false) continue;
    for (const one of Array.isArray(value) ? value : [value]) copy.append(name, one);
  }
  return copy;
}

// The view that the address names, once more.
export const again = () => window.dispatchEvent(new HashChangeEvent("hashchange"));

export function go(view, parameters, { replace = false } = {}) {
  const address = link(view, parameters);
  if (address === location.hash) return;
  if (replace) {
    history.replaceState(null, "", address);
    again();
  } else location.hash = address;
}
