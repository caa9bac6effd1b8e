// SPDX-License-Identifier: Apache-2.0
// Requests to the router that sent this page. The API key stays in this tab's session storage.

const KEY = "kvrouter-api-key";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const key = () => sessionStorage.getItem(KEY);
export const keepKey = (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY));

function headers(more = {}) {
  return key() ? { ...more, authorization: `Bearer ${key()}` } : more;
}

async function problem(response) {
  let text = `${response.status} ${response.statusText}`;
  try {
    text = (await response.json()).error.message;
  } catch {
    // The status says it.
  }
  return new ApiError(response.status, text);
}

async function send(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "the router does not answer; it may be stopped, or the network between is");
  }
  if (!response.ok) throw await problem(response);
  return response;
}

export const get = async (path, signal) => (await send(path, { headers: headers(), signal })).json();
export const getText = async (path, signal) => (await send(path, { headers: headers(), signal })).text();

export async function post(path, body, signal) {
  const response = await send(path, {
    method: "POST", body: JSON.stringify(body), signal, headers: headers({ "content-type": "application/json" }),
  });
  return response.json();
}

/** Calls `heard` with {id, type, data} of each event until `signal` aborts or the stream ends. Server-Sent Events by
 * fetch, as EventSource sends no key. */
export async function events(path, lastId, heard, signal) {
  const more = lastId ? { "last-event-id": lastId } : {};
  const response = await send(path, { headers: headers(more), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const event = {};
      for (const line of part.split("\n")) {
        if (line.startsWith("id: ")) event.id = line.slice(4);
        else if (line.startsWith("event: ")) event.type = line.slice(7);
        else if (line.startsWith("data: ")) event.data = JSON.parse(line.slice(6));
      }
      if (event.data) heard(event);
    }
  }
}

const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? ([^ ]+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;
const ESCAPES = { n: "\n", '"': '"', "\\": "\\" };

/** Samples of a page of metrics, [labels, value] by name, of the names that are wanted. */
export function samples(page, wanted) {
  const found = new Map(wanted.map((name) => [name, []]));
  for (const line of page.split("\n")) {
    const name = line.slice(0, line.search(/[{ ]/));
    if (!found.has(name)) continue;
    const match = SAMPLE.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, label, value] of (match[2] ?? "").matchAll(LABEL)) {
      labels[label] = value.replace(/\\(.)/g, (_, char) => ESCAPES[char] ?? char);
    }
    found.get(name).push([labels, Number(match[3])]);
  }
  return found;
}

export const total = (list, where = () => true) =>
  list.reduce((sum, [labels, value]) => sum + (where(labels) ? value : 0), 0);
