// SPDX-License-Identifier: Apache-2.0
// Lines over time, drawn by uPlot. The newest values are also given as text, for screen readers.

import { el } from "./dom.js";
import { brief, clock, minute } from "./words.js";

const KEPT = 300;
const MINUTE_S = 60;
// The opacity, appended to a colour #rrggbb. The first series is drawn as an area, so that a line over it can be seen where
// both are equal.
const SHADE = "40";

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export class Chart {
  /**
   * unit: the unit of all series. series: [name, custom property of its colour] of each.
   * write: returns a value as text. least: the smallest upper end of the axis.
   */
  constructor(title, unit, series, { height = 190, write = brief, least = 1 } = {}) {
    Object.assign(this, { title, unit, series, height, write, least });
    this.data = [[], ...series.map(() => [])];
    this.bounds = null;
    this.node = el("div", { class: "chart", role: "img", "aria-label": `${title}: nothing yet` });
    this.plot = null;
    this.watch = new ResizeObserver(() => this.fit());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
  }

  /** Returns a panel with the chart and its title. */
  panel() {
    return el("section", { class: "panel" },
      el("h3", {}, this.title, el("span", { class: "small quiet unit", text: this.unit })), this.node);
  }

  /** Appends a value to each series, and drops the oldest values. */
  add(time_s, values) {
    this.data[0].push(time_s);
    values.forEach((value, i) => this.data[i + 1].push(value));
    if (this.data[0].length > KEPT) this.data.forEach((column) => column.shift());
    this.show();
  }

  /** Replaces all values. */
  set({ time_s, from_s, to_s }, columns) {
    this.data = [time_s, ...columns];
    this.bounds = [from_s, to_s];
    this.show();
  }

  show() {
    const last = this.last();
    const values = this.series.map(([name], i) => `${name} ${last < 0 ? "–" : this.write(this.data[i + 1][last])}`).join(", ");
    this.node.setAttribute("aria-label", `${this.title}, ${this.unit}: now ${values}`);
    if (!this.plot) return;
    this.plot.setData(this.data);
    this.tell();
  }

  /** Returns the index of the newest time at which any series has a value, or -1. */
  last() {
    let at = this.data[0].length - 1;
    while (at >= 0 && this.series.every((_, i) => this.data[i + 1][at] === null)) at -= 1;
    return at;
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
    if (this.plot === null && !this.node.isConnected) return;
    this.plot?.destroy();
    const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") } };
    const times = (_, ticks, axisIdx, space, step_s) => ticks.map(step_s < MINUTE_S ? clock : minute);
    this.plot = new window.uPlot({
      width: Math.max(200, this.node.clientWidth || 400),
      height: this.height,
      cursor: { drag: { x: false, y: false } },
      scales: {
        x: { range: (_, low, high) => this.bounds ?? [low, high] },
        y: { range: (_, low, high) => [0, Math.max(this.least, high ?? this.least) * 1.1] },
      },
      axes: [{ ...axis, space: 70, size: 34, values: times }, { ...axis, size: 62, values: (_, ticks) => ticks.map(this.write) }],
      series: [{ label: "at", value: (_, value) => (value ? clock(value) : "–") }, ...this.series.map(([name, property], i) => ({
        label: name, stroke: colour(property), width: 2, points: { show: false, filter: (_, number) => this.lonely(number) },
        fill: i ? undefined : colour(property) + SHADE,
        value: (_, value) => this.write(value),
      }))],
    }, this.data, this.node);
    this.tell();
  }

  /** Returns the places of a series' values without a neighbour: no line leads to them, so they are drawn as points. */
  lonely(number) {
    const column = this.data[number];
    const isNone = (value) => value === null || value === undefined;
    return [...column.keys()].filter((i) => !isNone(column[i]) && isNone(column[i - 1]) && isNone(column[i + 1]));
  }

  /** The legend has the newest values while the pointer is elsewhere. */
  tell() {
    const idx = this.last();
    if (idx >= 0 && !(this.plot.cursor.left >= 0)) this.plot.setLegend({ idx });
  }

  fit() {
    const width = this.node.clientWidth;
    if (!this.plot || width <= 0) return;
    if (Math.abs(this.plot.width - width) > 1) this.plot.setSize({ width, height: this.height });
    this.tell();
  }
}
