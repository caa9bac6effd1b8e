// SPDX-License-Identifier: Apache-2.0
// Where one prompt is cached: block by block, group by group, worker by worker.

import { key, post } from "./api.js";
import { costs } from "./bars.js";
import { copyButton } from "./copy.js";
import { el, pill, show } from "./dom.js";
import { NO_WORKER } from "./workers.js";
import { blocks, count, group, percent, pullText, route, tiers, tiersOf, tone, withSource } from "./words.js";

const EXAMPLES = { text: "Once upon a time", chat: '[{"role": "user", "content": "Hello"}]', tokens: "2, 105, 2364, 107" };

// How many workers are shown at first, and how many more by each click.
const SHOWN = 8;
const MORE = 50;
const MEDIA = ["GPU", "CPU", "STORAGE"];

let shownWorkers = SHOWN;
let answer = null;
let problem = "";
let busy = false;

function tokens(text) {
  const found = text.split(/[\s,[\]]+/).filter(Boolean).map(Number);
  if (!found.length || !found.every((id) => Number.isInteger(id) && id >= 0)) {
    throw new Error("tokens are whole numbers from 0 on, with commas or spaces between");
  }
  return found;
}

function chat(text) {
  let messages;
  try {
    messages = JSON.parse(text);
  } catch (error) {
    throw new Error(`the chat is no JSON: ${error.message}; write a list of {"role", "content"}`);
  }
  // A whole body of /v1/chat/completions is as good.
  const body = Array.isArray(messages) ? { messages } : messages;
  if (!Array.isArray(body.messages)) throw new Error('the chat has no list "messages"');
  return body;
}

/** Returns a curl command with the same question for /select. The body is in a here-document, because an argument has a
 * limited length and would need quoting. */
function curlOf(body) {
  const header = key() ? ' -H "authorization: Bearer $KVROUTER_API_KEY"' : "";
  return `curl -s ${location.origin}/select -H 'content-type: application/json'${header} -d @- <<'EOF'\n${JSON.stringify(body)}\nEOF`;
}

async function ask(app, form) {
  const { model, kind, text, lora_name, cache_salt } = Object.fromEntries(new FormData(form));
  busy = true;
  // At once: what stands there until the next frame answers the question before.
  document.getElementById("prompt-answer").ariaBusy = "true";
  app.changed();
  try {
    const more = {};
    if (lora_name) more.lora_name = lora_name;
    if (cache_salt) more.cache_salt = cache_salt;
    let token_ids;
    let given;
    if (kind === "tokens") {
      token_ids = tokens(text);
      given = { token_ids };
    } else {
      // The engine's own tokens, as its answer to the prompt would begin with.
      given = kind === "text" ? { prompt: text } : chat(text);
      token_ids = (await post("/tokenize", { ...given, model: lora_name || model }, app.signal)).tokens;
    }
    const [query, choice] = await Promise.all([
      post("/query", { model, token_ids, explain: true, held: true, ...more }, app.signal),
      post("/select", { model, token_ids, explain: true, dry_run: true, ...more }, app.signal).catch((error) => ({ problem: error.message })),
    ]);
    shownWorkers = SHOWN;
    answer = { token_ids, query, choice, curl: curlOf({ ...given, model, explain: true, dry_run: true, ...more }) };
    problem = "";
  } catch (error) {
    if (error.status === 401) app.failed(error);
    answer = null;
    problem = error.message;
  }
  busy = false;
  app.changed();
}

/** One place of a worker as a strip along the prompt. alone: tokens up to which its group alone would allow the hit. */
function lane(place, kind, length, alone) {
  const covered = place.runs.reduce((sum, [first, end]) => sum + end - first, 0);
  const name = `${group(place.group_idx)} ${place.medium}${place.owner ? ` (${place.owner})` : ""}`;
  const ranges = place.runs.length ? place.runs.slice(0, 20).map(([first, end]) => `${first} to ${end}`).join(", ") : "none";
  return [
    el("span", { title: kind, text: `${name} ${kind}` }),
    el("div", {
      class: `strip ${place.medium.toLowerCase()}`, role: "img", "data-place": `${group(place.group_idx)}:${place.medium}`,
      "data-runs": JSON.stringify(place.runs), "aria-label": `${name}: tokens held of ${length}: ${ranges}`, title: `tokens ${ranges}`,
    }, place.runs.map(([first, end]) =>
      el("i", { vars: { "--first": `${(100 * first) / length}%`, "--part": `${(100 * (end - first)) / length}%` } })),
    alone === undefined ? null : at(alone, length)),
    el("span", { class: "number", text: `${blocks(Math.ceil(covered / place.block_size))} of ${place.block_size}${alone === undefined ? "" : `, alone ${count(alone)} tokens`}` }),
  ];
}

const at = (hit, length) => el("b", { vars: { "--first": `calc(${(100 * hit) / length}% - 3px)` } });

function worker(name, instance, length, state) {
  const known = state.workers.find((worker) => worker.worker_id === name);
  const kinds = new Map((known?.catalog?.groups ?? []).map((cacheGroup) => [cacheGroup.group_idx, cacheGroup.kind.replaceAll("_", " ")]));
  const alone = new Map((instance.groups ?? []).map((cacheGroup) => [cacheGroup.group_idx, cacheGroup.covered]));
  const held = [...instance.held ?? []].sort((a, b) => a.group_idx - b.group_idx || MEDIA.indexOf(a.medium) - MEDIA.indexOf(b.medium));
  return el("section", { class: "panel", "data-key": name, "data-worker": name, "aria-label": `Worker ${name}` },
    el("h3", {}, name, " ", pill(instance.state.replaceAll("_", " "), tone(instance.state))),
    el("p", {}, `Reuses ${count(instance.longest_matched)} of ${count(length)} tokens (${percent(instance.longest_matched, length)}): `,
      `${tiers(instance, tiersOf(known))}.`),
    instance.peer ? el("p", { text: `Would reuse ${withSource(instance.peer, instance.longest_matched)}.` }) : null,
    instance.limited_by ? el("p", { class: "quiet" }, `Limited by ${group(instance.limited_by.group_idx)} ${instance.limited_by.kind.replaceAll("_", " ")}: ${instance.limited_by.why}.`) : null,
    instance.reason ? el("p", { class: "quiet", text: instance.reason }) : null,
    !held.some((place) => place.runs.length) ? el("p", { class: "quiet", text: "It holds no block of this prompt." }) : el("div", { class: "lanes" },
      el("strong", { text: "reused" }),
      el("div", { class: "strip", role: "img", "aria-label": `reused: ${instance.longest_matched} of ${length} tokens`, "data-reused": instance.longest_matched },
        el("i", { vars: { "--first": "0%", "--part": `${(100 * instance.longest_matched) / length}%` } })),
      el("span", { class: "number", text: `${count(instance.longest_matched)} tokens` }),
      held.map((place) => lane(place, kinds.get(place.group_idx) ?? "", length, place.medium === "GPU" ? alone.get(place.group_idx) : undefined))));
}

function update({ state }) {
  const models = [...new Set(state.workers.map((worker) => worker.model))].sort();
  show(document.getElementById("prompt-models"), models.map((name) => el("option", { value: name, text: name })));
  const none = state.health && !models.length;
  document.getElementById("prompt-ask").disabled = none;
  show(document.getElementById("prompt-problem"), problem ? el("p", { class: "notice", text: problem }) : null,
    none ? el("p", { class: "notice warning", text: NO_WORKER }) : null,
    busy ? el("p", { text: "Asking…" }) : null);
  const pane = document.getElementById("prompt-answer");
  pane.ariaBusy = String(busy);
  if (!answer) {
    show(pane);
    return;
  }
  const { query, choice, token_ids, curl } = answer;
  const length = token_ids.length;
  const chosen = choice.problem ? "" : route(choice);
  const names = Object.keys(query.instances).sort((a, b) => (b === chosen) - (a === chosen)
    || query.instances[b].longest_matched - query.instances[a].longest_matched || a.localeCompare(b, "en", { numeric: true }));
  const left = names.length - shownWorkers;
  show(pane,
    el("section", { class: "panel", "aria-label": "Choice" },
      el("h3", { text: choice.problem ? "No worker would get it" : `It would go to ${chosen}` }),
      el("p", { text: choice.problem ?? choice.reason }), choice.pull ? el("p", { text: `Fetches ${pullText(choice.pull)}.` }) : null, choice.candidates ? costs(choice.candidates, chosen, state.workers) : null,
      el("details", {}, el("summary", { text: "The same from a terminal" }), el("div", { class: "command" }, el("code", { text: curl }), copyButton(curl, "the command")))),
    el("p", { class: "quiet", text: `${count(length)} tokens. Each bar is the whole prompt. Its coloured part is cached in that group; the mark is the longest hit that this group alone would allow. A group with a window needs only the end of it.` }),
    names.slice(0, shownWorkers).map((name) => worker(name, query.instances[name], length, state)),
    left > 0 ? el("p", {}, el("button", { type: "button", class: "second", id: "prompt-more", text: `Show ${count(Math.min(left, MORE))} more of ${count(left)} workers` })) : null);
}

export const prompt = {
  id: "prompt",
  title: "Prompt",
  mount(root, app) {
    const form = el("form", { class: "panel", on: {
      submit: (event) => {
        event.preventDefault();
        ask(app, event.target);
      },
      change: (event) => {
        if (event.target.name === "kind") form.elements.text.placeholder = EXAMPLES[event.target.value];
      },
    } },
    el("div", { class: "fields" },
      el("label", {}, el("span", { text: "Model" }), el("select", { name: "model", id: "prompt-models" })),
      el("label", {}, el("span", { text: "LoRA adapter (optional)" }), el("input", { name: "lora_name", autocomplete: "off" })),
      el("label", {}, el("span", { text: "Cache salt (optional)" }), el("input", { name: "cache_salt", autocomplete: "off" }))),
    el("fieldset", {}, el("legend", { class: "small quiet", text: "The prompt is" }), [["text", "text"], ["chat", "chat messages, in JSON"], ["tokens", "token ids"]].map(([value, text], i) =>
      el("label", {}, el("input", { type: "radio", name: "kind", value, checked: i === 0 }), ` ${text}`))),
    el("label", {}, el("span", { text: "Prompt" }), el("textarea", { name: "text", required: true, spellcheck: "false", placeholder: EXAMPLES.text })),
    el("button", { type: "submit", id: "prompt-ask", text: "Show where it is cached" }), el("span", { class: "quiet small", text: "Nothing is sent to an engine." }));
    root.append(el("h2", { text: "Prompt" }), form, el("div", { id: "prompt-problem", role: "alert" }), el("div", { id: "prompt-answer", "aria-live": "polite", on: { click: (event) => {
      if (event.target.id !== "prompt-more") return;
      shownWorkers += MORE;
      app.changed();
    } } }));
  },
  update,
};
