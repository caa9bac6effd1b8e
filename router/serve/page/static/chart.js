// SPDX-License-Identifier: Apache-2.0
// Lines over the last minutes, drawn by uPlot; what it draws is said in words beside it.

import { el } from "./dom.js";
import { brief, clock } from "./words.js";

const KEPT = 300;

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export class Chart {
  /** series: [name, custom property of its colour]; unit: of all of them. */
  constructor(title, unit, series) {
    this.title = title;
    this.unit = unit;
    this.series = series;
    this.data = [[], ...series.map(() => [])];
    this.node = el("div", { class: "chart", role: "img", "aria-label": `${title}: nothing yet` });
    this.plot = null;
    this.watch = new ResizeObserver(() => this.fit());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
  }

  add(time_s, values) {
    this.data[0].push(time_s);
    values.forEach((value, i) => this.data[i + 1].push(value));
    if (this.data[0].length > KEPT) this.data.forEach((column) => column.shift());
    const said = this.series.map(([name], i) => `${name} ${brief(values[i])}`).join(", ");
    this.node.setAttribute("aria-label", `${this.title}, ${this.unit}: now ${said}`);
    if (!this.plot) return;
    this.plot.setData(this.data);
    this.tell();
  }

  mount() {
    this.watch.observe(this.node);
    this.redraw();
    return this.node;
  }

  unmount() {
    this.watch.disconnect();
    this.plot?.destroy();
    this.plot = null;
  }

  redraw() {
    this.plot?.destroy();
    const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") } };
    this.plot = new window.uPlot({
      width: Math.max(200, this.node.clientWidth || 400),
      height: 190,
      cursor: { drag: { x: false, y: false } },
      scales: { y: { range: (_, low, high) => [0, Math.max(1, high ?? 1) * 1.1] } },
      axes: [{ ...axis, space: 90, values: (_, ticks) => ticks.map(clock) }, { ...axis, size: 56, values: (_, ticks) => ticks.map(brief) }],
      series: [{ label: "at", value: (_, value) => (value ? clock(value) : "–") }, ...this.series.map(([name, property], i) => ({
        label: `${name} (${this.unit})`, stroke: colour(property), width: 2, points: { show: false },
        // Lines that lie upon each other are both seen.
        dash: i ? [7, 5] : undefined,
        value: (_, value) => brief(value),
      }))],
    }, this.data, this.node);
    this.tell();
  }

  /** The legend has the newest values while the pointer is elsewhere. */
  tell() {
    const last = this.data[0].length - 1;
    if (last >= 0 && !(this.plot.cursor.left >= 0)) this.plot.setLegend({ idx: last });
  }

  fit() {
    const width = this.node.clientWidth;
    if (this.plot && width > 0 && Math.abs(this.plot.width - width) > 1) this.plot.setSize({ width, height: 190 });
  }
}
