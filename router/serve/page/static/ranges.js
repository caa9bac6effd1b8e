// SPDX-License-Identifier: Apache-2.0
// The choice of the time that charts show, which all views share.

import { el, show } from "./dom.js";
import { RANGES } from "./history.js";

/** A group of buttons, one for each range. */
export function rangePicker(app, id) {
  return el("div", { class: "ranges", role: "group", "aria-label": "Time shown", id, on: { click: (event) => {
    const { range } = event.target.dataset;
    if (!range) return;
    app.state.history.choose(range);
    app.rangeChanged();
    app.changed();
  } } });
}

/** Shows which range is chosen, and since when there are lines where the router keeps none. */
export function drawRanges(id, { history }) {
  show(document.getElementById(id), history.isKept ? RANGES.map(({ name, title }) =>
    el("button", { type: "button", class: "second", "data-range": name, "aria-pressed": String(history.range === name), text: title }))
    : el("p", { class: "quiet small", text: "This router keeps no history: charts begin when you opened this page." }));
}
