// SPDX-License-Identifier: Apache-2.0
// The problems of the fleet: the doctor's findings by severity and code, and how to fix them.

import { get } from "./api.js";
import { copyButton } from "./copy.js";
import { el, pill, show } from "./dom.js";
import { count, decoded, seconds } from "./words.js";

// A report connects to every endpoint of the fleet, so the router makes at most one in this time for all open pages.
export const DOCTOR_MS = 60_000;
// For each severity, the gravest first: [title of one finding, title of several, tone].
const SEVERITIES = { error: ["error", "errors", "bad"], warning: ["warning", "warnings", "warn"], note: ["note", "notes", ""] };
// How many subjects of one code are shown, and how many may be unfolded.
const SHOWN = 5;
const UNFOLDED = 200;

let running = false;
// The explanation of each code, or an object with only `problem` that says why it could not be read.
const meanings = new Map();

/** Reads the findings; the answer may be as old as `max_age_ms`. */
export async function examine(app, signal, max_age_ms = DOCTOR_MS) {
  const report = await get(`/diagnosis?max_age_s=${max_age_ms / 1000}`, signal);
  Object.assign(app.state, { findings: report.findings, diagnosis: report, examined_ms: Date.now() - 1000 * (report.age_s ?? 0) });
}

async function run(app) {
  if (running) return;
  running = true;
  app.changed();
  try {
    await examine(app, app.signal, 0);
  } catch (error) {
    app.failed(error);
  }
  running = false;
  app.changed();
}

async function explain(app, code) {
  if (meanings.get(code)?.cause) return;
  try {
    meanings.set(code, await get(`/diagnosis/${code}`, app.signal));
  } catch (error) {
    if (error.name === "AbortError") return;
    meanings.set(code, { problem: error.message });
  }
  app.changed();
}

// A router of the former release names no workers and no model in its findings.
const workersOf = ({ workers = [] }) => workers;

/** Whether a finding is about this model, or about no model in particular. */
const isOf = (model, finding) => !model || !finding.model || finding.model === model;

/** Returns a text as nodes, with its parts in backticks as code elements. */
const coded = (text) => text.split("`").map((part, i) => (i % 2 ? el("code", { text: part }) : part));

// Quoted arguments of a command, as Python's shlex.quote writes them: a separator within quotes does not end a part. A quote
// after a letter is an apostrophe.
const QUOTED = /"'"|(?<!\w)'[^']*'/;
const COMMAND = /^(?:curl|kvrouter|nc|ls|openssl|redis-cli|valkey-cli|timedatectl|vllm|sglang|python3?) /;
const PIECE = new RegExp(`(?:${QUOTED.source}|[^])*?(?:; |: |, | \\(|$)`, "gy");

/** Returns the parts of a fix in order, each {prose} or {command}. A command ends at "; ", ": ", ", " or " (". */
export function partsOf(text) {
  const parts = [];
  for (const [piece] of text.matchAll(PIECE)) {
    if (!piece) break;
    const [, text, mark] = /^([^]*?)(; |: |, | \(|)$/.exec(piece);
    if (COMMAND.test(text)) parts.push({ command: text }, { prose: mark });
    else parts.push({ prose: piece });
  }
  return parts;
}

/** Returns a fix as an element, with a copy button for each command in it. */
function fix(text) {
  const shown = [];
  let prose = "";
  const flush = () => {
    const left = prose.replace(/^[;,:] /, "").trim();
    if (left) shown.push(el("p", { text: left }));
    prose = "";
  };
  for (const part of partsOf(text.replaceAll("ROUTER", location.origin))) {
    if (part.prose !== undefined) {
      prose += part.prose;
      continue;
    }
    flush();
    shown.push(el("div", { class: "command" }, el("code", { text: part.command }), copyButton(part.command, "the command")));
  }
  flush();
  return el("div", { class: "fix" }, shown);
}

const workerLink = (name, text) => el("a", { href: `#fleet/${encodeURIComponent(name)}`, "data-row": name, text });

/** Returns the subject as a link to the worker's row. If there are several workers, each name in it is a link, and the names
 * that are not in it follow. */
function subject(finding) {
  const names = workersOf(finding);
  if (names.length === 1) return workerLink(names[0], finding.subject);
  const parts = [];
  const others = [];
  let rest = finding.subject;
  for (const name of names) {
    const at = rest.indexOf(name, rest.indexOf(" "));
    if (at < 0) {
      others.push(others.length ? ", " : " (", workerLink(name, name));
      continue;
    }
    parts.push(el("strong", { text: rest.slice(0, at) }), workerLink(name, name));
    rest = rest.slice(at + name.length);
  }
  return [parts, el("strong", { text: rest }), others, others.length ? ")" : null];
}

const subjects = (list, hasOneFix) => el("ul", {}, list.map((finding) => el("li", { "data-key": `${finding.subject}/${finding.evidence}` },
  subject(finding), " ", el("span", { class: "quiet", text: finding.evidence }),
  hasOneFix ? null : el("details", { "data-key": "fix" }, el("summary", { text: "How to fix it" }), fix(finding.fix)))));

function meaning(code) {
  const known = meanings.get(code);
  if (!known) return el("p", { class: "quiet", text: "Loading…" });
  if (!known.cause) return el("p", { class: "quiet", text: `The router gives no explanation: ${known.problem}` });
  return [el("p", {}, coded(known.cause)), el("p", {}, el("strong", { text: "Remedy: " }), coded(known.remedy))];
}

/** Returns a card with one code and all subjects at which it was found. */
function card(code, list, tone) {
  const hasOneFix = list.every((finding) => finding.fix === list[0].fix);
  const first = list.length <= SHOWN + 1 ? list : list.slice(0, SHOWN);
  const rest = list.slice(first.length, UNFOLDED);
  const left = list.length - first.length - rest.length;
  return el("article", { class: `panel finding ${tone}`, "data-key": code, "data-code": code, "aria-label": `${code}: ${list[0].problem}` },
    el("h4", {}, el("code", { text: code }), ` ${list[0].problem[0].toUpperCase()}${list[0].problem.slice(1)}`,
      list.length > 1 ? [" ", pill(`${count(list.length)} findings`, "")] : null),
    subjects(first, hasOneFix),
    rest.length ? el("details", { "data-key": "rest" }, el("summary", { text: `${count(rest.length + left)} more` }), subjects(rest, hasOneFix),
      left ? el("p", { class: "quiet", text: `${count(left)} more are not shown.` }) : null) : null,
    hasOneFix ? fix(list[0].fix) : null,
    el("details", { "data-key": "meaning", "data-explain": code }, el("summary", { text: `What ${code} means` }), meaning(code)));
}

function bySeverity(findings) {
  return Object.entries(SEVERITIES).map(([severity, [singular, plural, tone]]) => {
    const codes = new Map();
    const list = findings.filter((finding) => finding.severity === severity);
    for (const finding of list) codes.set(finding.code, [...(codes.get(finding.code) ?? []), finding]);
    if (!list.length) return null;
    const title = `${count(list.length)} ${list.length === 1 ? singular : plural}`;
    return el("section", { "data-key": severity, "aria-label": title }, el("h3", { text: title }),
      [...codes].map(([code, alike]) => card(code, alike, tone)));
  });
}

const named = () => decoded(location.hash.slice(1).split("?")[0].split("/").slice(1).join("/"));

function update({ state }) {
  const { diagnosis, model, examined_ms } = state;
  const now = document.getElementById("doctor-now");
  document.getElementById("doctor-run").disabled = running;
  if (!diagnosis) {
    show(now, el("p", { class: "quiet", text: "Looking at every endpoint…" }));
    return;
  }
  const name = named();
  const ofModel = diagnosis.findings.filter((finding) => isOf(model, finding));
  const shown = name ? ofModel.filter((finding) => workersOf(finding).includes(name)) : ofModel;
  const left = diagnosis.findings.length - ofModel.length;
  const checked = `${count(diagnosis.checks)} checks of ${count(diagnosis.workers)} ${diagnosis.workers === 1 ? "worker" : "workers"}`;
  show(now,
    el("p", { class: "quiet", role: "status", text: running ? "Looking at every endpoint…" : `${checked}, ${seconds(Math.max(1, Math.round((Date.now() - examined_ms) / 1000)))} ago.` }),
    name ? el("p", {}, `Findings about ${name} alone. `, el("a", { href: "#doctor", text: "Show all" })) : null,
    shown.length ? null : el("p", { class: "panel well" }, pill("nothing found", "good"),
      name ? ` No check found anything wrong with ${name}.` : " No check found anything wrong."),
    bySeverity(shown),
    left ? el("p", { class: "quiet", text: `${count(left)} findings about other models are not shown.` }) : null);
}

export const doctor = {
  id: "doctor",
  title: "Doctor",
  mount(root, app) {
    const body = el("div", { id: "doctor-now" });
    // Listen in the capture phase, because the toggle event of a details element does not bubble.
    body.addEventListener("toggle", (event) => {
      const code = event.target.dataset.explain;
      if (code && event.target.open) explain(app, code);
    }, true);
    root.append(el("div", { class: "bar-of-tools" }, el("h2", { text: "Doctor" }),
      el("button", { type: "button", class: "second", id: "doctor-run", text: "Run the doctor", on: { click: () => run(app) } })), body);
  },
  moved() {},
  close() {
    if (named()) location.hash = "doctor";
  },
  update,
};
