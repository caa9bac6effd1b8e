// SPDX-License-Identifier: Apache-2.0
// Numbers and names as people read them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const some = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const tenths = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export const count = (value) => (value === null || value === undefined ? "–" : whole.format(value));
export function brief(value) {
  if (value === null || value === undefined) return "–";
  return (value < 1 ? some : short).format(value);
}
/** Nearly all is never shown as all, nor next to nothing as nothing. */
export function percent(part, all) {
  if (!all) return "–";
  const found = (100 * part) / all;
  if (found > 0 && found < 0.1) return "< 0.1 %";
  if (found > 99.9 && found < 100) return "> 99.9 %";
  return `${tenths.format(found)} %`;
}

export const blocks = (number) => counted(number, "block");

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value > 0 && value < 0.001) return "< 1 ms";
  if (value < 1) return `${some.format(value * 1000)} ms`;
  if (value < 120) return `${some.format(value)} s`;
  if (value < 7200) return `${whole.format(value / 60)} min`;
  return `${some.format(value / 3600)} h`;
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const power = Math.min(4, Math.floor(Math.log2(Math.max(1, value)) / 10));
  return `${some.format(value / 1024 ** power)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

export const clock = (time_s) => new Date(time_s * 1000).toLocaleTimeString("en-GB");
export const minute = (time_s) => clock(time_s).slice(0, 5);

/** A rate with 3 digits, such as 29.4 or 0.02. */
export const rate = (value) => (value === null || value === undefined ? "–" : value < 1000 ? some.format(value) : short.format(value));

/** A long name with its middle left out, because ids mostly differ at their ends. */
export function middle(text, most = 28) {
  if (text.length <= most) return text;
  const kept = most - 1;
  return `${text.slice(0, Math.ceil(kept / 2))}…${text.slice(text.length - Math.floor(kept / 2))}`;
}

/** A part of an address as text. What somebody wrote by hand may not be encoded; then it is taken as it is. */
export function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/** "1 worker", "2 workers". */
export const counted = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

/** The address of a request's trace, from the setting trace_url; null if the setting or a part that it needs is missing. */
export function traceUrl(template, parts) {
  if (!template) return null;
  let isWhole = true;
  const address = template.replace(/\{(trace_id|request_id)\}/g, (_, name) => {
    if (!parts[name]) isWhole = false;
    return encodeURIComponent(parts[name] ?? "");
  });
  return isWhole ? address : null;
}
export const route = (worker) => (worker.dp_rank ? `${worker.worker_id}@${worker.dp_rank}` : worker.worker_id);
export const group = (idx) => (idx === null || idx === undefined ? "g-" : `g${idx}`);

const NAMES = { cpu: "CPU" };
const MEDIA = { STORAGE: "disk" };
/** The names of the tiers in which a worker holds blocks or has held some. */
export const tiersOf = (worker) => new Set(Object.keys(worker?.residency ?? {}).map((place) => {
  const medium = place.split(":")[1];
  return MEDIA[medium] ?? medium.toLowerCase();
}));

/** The tokens of a hit by tier, the nearest first, such as "688 on the GPU, +64 CPU". has: tiers that are named even if
 * they add 0 tokens. */
export function tiers(hit, has) {
  const known = Object.entries(hit).filter(([name, tokens]) => typeof tokens === "number" && name !== "longest_matched");
  return known.map(([name, tokens], i) => {
    if (i === 0) return `${count(tokens)} on the ${name.toUpperCase()}`;
    const more = tokens - known[i - 1][1];
    return more || has.has(name) ? `+${count(more)} ${NAMES[name] ?? name}` : null;
  }).filter(Boolean).join(", ");
}

/** A worker's hit with a source, as a part of a sentence. own: the tokens of its hit without one. */
export const withSource = (peer, own) => `${count(peer.tokens)} with blocks that ${route(peer)} lends (+${count(peer.tokens - own)})`;

/** The blocks that a chosen worker fetches. */
export const pullText = ({ tokens, fetched_tokens: fetched, timeout_s, ...source }) =>
  `${count(fetched)} tokens from ${route(source)}, waits ${seconds(timeout_s)} at most; ${count(tokens)} tokens are reused if all arrive`;

const TONES = { live: "good", down: "bad", unhashable: "bad", mismatched: "bad" };
export const tone = (state) => TONES[state] ?? "warn";
