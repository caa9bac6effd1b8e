// SPDX-License-Identifier: Apache-2.0
// The buttons that choose the range of time that charts show. All views share the choice.

import { el, show } from "./dom.js";
import { RANGES } from "./history.js";

/** Returns an empty group for the buttons, which `drawRanges` fills. */
export function rangePicker(app, id) {
  return el("div", { class: "ranges", role: "group", "aria-label": "Time shown", id, on: { click: (event) => {
    const { range } = event.target.dataset;
    if (!range) return;
    app.state.history.choose(range);
    app.rangeChanged();
    app.changed();
  } } });
}

/** Draws a button for each range, with the chosen one pressed. If the router keeps no history, says so instead. */
export function drawRanges(id, { history }) {
  show(document.getElementById(id), history.isKept ? RANGES.map(({ name, title }) =>
    el("button", { type: "button", class: "second", "data-range": name, "aria-pressed": String(history.range === name), text: title }))
    : el("p", { class: "quiet small", text: "This router keeps no history: charts begin when you opened this page." }));
}
