// Questions to the server. A report has no server: its answers lie in the page.

const kept = document.getElementById("answers");
const answers = kept ? JSON.parse(kept.textContent) : null;
export const isReport = answers !== null;

export function address(path, parameters = {}) {
  const query = new URLSearchParams();
  for (const name of Object.keys(parameters).sort()) {
    const value = parameters[name];
    if (value === undefined || value === null || value === "") continue;
    for (const one of Array.isArray(value) ? value : [value]) query.append(name, one);
  }
  const text = query.toString();
  return text ? `${path}?${text}` : path;
}

export async function get(path, parameters = {}, signal = undefined) {
  const asked = address(path, parameters);
  if (isReport) {
    const name = decodeURIComponent(asked.replaceAll("+", " "));
    if (!(name in answers)) throw new Error("This is not in the report. Start the explorer to ask for it: dualform explore RUN.");
    return answers[name];
  }
  return read(await reach(asked, { signal }));
}

export async function post(path, body) {
  return read(await reach(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) }));
}

export async function remove(path) {
  return read(await reach(path, { method: "DELETE" }));
}

async function reach(asked, options) {
  try {
    return await fetch(asked, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The explorer does not answer. Is it still running in its terminal?");
  }
}

async function read(response) {
  let found;
  try {
    found = await response.json();
  } catch {
    throw new Error(`The explorer gave an answer that cannot be read (${response.status}).`);
  }
  if (!response.ok) {
    const error = new Error(found.problem ?? `The explorer answered ${response.status}.`);
    error.status = response.status;
    throw error;
  }
  return found;
}
