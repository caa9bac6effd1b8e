// SPDX-License-Identifier: Apache-2.0
// All workers at a glance, as coloured cells on a canvas: a column for each worker, in the order of the table below it.
// In mode "fill", a column has a cell for the whole cache and, if there is room, one below it for each group. A tip beside
// the pointer describes the worker under it.

import { el, show, table } from "./dom.js";
import { brief, count, middle, percent, seconds } from "./words.js";
import { DOUBTED } from "./workers.js";

const MOST_HEIGHT = 300;
// Sizes of a cell, [width, height], the largest first. The first with which all workers fit is used.
const SIZES = [[110, 26], [72, 24], [48, 20], [24, 18], [16, 14], [12, 10], [9, 8], [7, 6], [5, 5]];
// A cell that is at least this wide shows its value, and the worker's id below it.
const TEXT_WIDTH = 48;
const GAP = 1;
const BELOW = 7;
const ID_HEIGHT = 18;
const LABELS_WIDTH = 30;
// The label of the first cell of a column in mode "fill".
const WHOLE = "all";
// How many steps a scale of colours has, and the values that the legend shows.
const STEPS = 50;
const SCALE = [0, 0.25, 0.5, 0.75, 1];

/**
 * The values that cells can show. value: returns the value of a row, null if it is not known.
 * most: the value that gets the full colour; null for the largest value in the fleet.
 */
export const MODES = {
  fill: { title: "Fill", colour: "--held", most: 1, value: (row) => row.fill, write: (value) => percent(value, 1), about: "Blocks held on the GPU, of those that the engine has" },
  load: { title: "Load", colour: "--part-queued", most: null, value: (row) => row.requests, write: count, about: "Requests in flight" },
  share: { title: "Hit share", colour: "--held-cpu", most: 1, value: (row) => row.share, write: (value) => percent(value, 1), about: "Prompt tokens reused, of all prompt tokens" },
  lag: { title: "Lag", colour: "--part-queued", most: null, value: (row) => row.lag_s, write: seconds, about: "Delay between an event and its effect" },
};

const heldOf = (group) => group.media.get("GPU") ?? 0;

const colourOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const channels = (colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));

/** Returns black or white, whichever is easier to read on a colour. */
const inkOn = ([red, green, blue]) => (0.299 * red + 0.587 * green + 0.114 * blue > 115 ? "#000000" : "#ffffff");

/** Returns a function from 0 to 1 to {ground, ink} on a scale between two colours, in steps that the eye hardly sees. */
function scale(from, to) {
  const [low, high] = [channels(from), channels(to)];
  const steps = Array.from({ length: STEPS + 1 }, (_, step) => {
    const mixed = low.map((channel, i) => Math.round(channel + ((high[i] - channel) * step) / STEPS));
    return { ground: `rgb(${mixed.join(",")})`, ink: inkOn(mixed) };
  });
  return (part) => steps[Math.round(STEPS * Math.min(1, Math.max(0, part)))];
}

export class Heatmap {
  /** opened: called with the row whose column was clicked. */
  constructor(opened) {
    this.mode = "fill";
    this.rows = [];
    this.page = [];
    this.opened = opened;
    this.canvas = el("canvas", { role: "img" });
    this.tip = el("div", { class: "tip", hidden: true, "aria-hidden": "true" });
    this.notes = el("div", { class: "small quiet heat-notes" });
    this.equal = el("details", { class: "small", on: { toggle: () => this.drawTable() } }, el("summary", { text: "Heat map as a table" }), el("div"));
    this.frame = el("div", { class: "heat" }, this.canvas, this.tip);
    this.node = el("div", {}, this.frame, this.notes, this.equal);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    this.canvas.addEventListener("click", (event) => {
      const row = this.rowAt(event);
      if (row) this.opened(row);
    });
    this.watch = new ResizeObserver(() => this.draw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  mount() {
    this.watch.observe(this.frame);
  }

  unmount() {
    this.watch.disconnect();
  }

  /** rows: all rows in order; page: the rows that the table below shows; mode: a key of MODES. */
  set(rows, page, mode) {
    Object.assign(this, { rows, page, mode });
    this.draw();
    this.drawTable();
  }

  /** Chooses the number of cells in a column and their size: groups are left out if the workers do not fit with them. */
  place() {
    const { width } = this.frame.getBoundingClientRect();
    const deepest = Math.max(0, ...this.rows.map((row) => row.groups.length));
    for (const depth of this.mode === "fill" && deepest > 1 ? [deepest + 1, 1] : [1]) {
      this.depth = depth;
      if (this.fits(width)) return;
    }
  }

  /** Chooses the largest size with which all workers fit at this depth, and returns whether there is one. */
  fits(width) {
    for (const [cellWidth, cellHeight] of SIZES) {
      const hasText = cellWidth >= TEXT_WIDTH;
      const inset = hasText && this.depth > 1 ? LABELS_WIDTH : 0;
      const across = Math.max(1, Math.floor((width - inset) / (cellWidth + GAP)));
      const lines = Math.ceil(this.rows.length / across);
      const lineHeight = this.depth * (cellHeight + GAP) + (hasText ? ID_HEIGHT : BELOW);
      this.at = { width, cellWidth, cellHeight, across, lineHeight, hasText, inset, height: lines * lineHeight };
      if (this.at.height <= MOST_HEIGHT) return true;
    }
    return false;
  }

  draw() {
    if (!this.frame.isConnected) return;
    const { width } = this.frame.getBoundingClientRect();
    this.frame.hidden = !this.rows.length;
    if (!width || !this.rows.length) return;
    this.place();
    const ratio = devicePixelRatio;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(this.at.height * ratio);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${this.at.height}px`;
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    pen.textBaseline = "middle";
    this.look = {
      colours: scale(colourOf("--empty"), colourOf(MODES[this.mode].colour)), line: colourOf("--quiet"), bad: colourOf("--bad"), text: colourOf("--text"),
    };
    this.most = this.largest();
    this.rows.forEach((row, i) => this.drawRow(pen, row, i));
    if (this.at.inset) this.drawLabels(pen);
    this.canvas.setAttribute("aria-label", `${MODES[this.mode].title} of ${count(this.rows.length)} workers. ${MODES[this.mode].about}: ${this.summary()}`);
    this.drawNotes();
  }

  /** Returns the value of full colour. If no engine reports its capacity, fill is relative to the fullest cache. */
  largest() {
    const { most, value } = MODES[this.mode];
    this.isRelative = this.mode === "fill" && this.rows.every((row) => row.fill === null);
    if (this.isRelative) return Math.max(1, ...this.rows.map((row) => row.held));
    return most ?? Math.max(1e-9, ...this.rows.map((row) => value(row) ?? 0));
  }

  /** Returns the values of a row's cells from the top, null for each that is not known. */
  values(row) {
    if (this.mode !== "fill") return [MODES[this.mode].value(row)];
    const part = (held) => (this.isRelative ? held : row.capacity ? held / row.capacity : null);
    return [part(row.held), ...(this.depth > 1 ? row.groups.map((group) => part(heldOf(group))) : [])];
  }

  write(value) {
    if (value === null) return "–";
    return this.isRelative ? brief(value) : MODES[this.mode].write(value);
  }

  drawRow(pen, row, i) {
    const { cellWidth, cellHeight, across, lineHeight, hasText, inset } = this.at;
    const x = inset + (i % across) * (cellWidth + GAP);
    const top = Math.floor(i / across) * lineHeight;
    this.values(row).forEach((value, j) => {
      const y = top + j * (cellHeight + GAP);
      if (value === null) {
        pen.strokeStyle = this.look.line;
        pen.globalAlpha = 0.5;
        pen.strokeRect(x + 0.5, y + 0.5, cellWidth - 1, cellHeight - 1);
        pen.globalAlpha = 1;
      } else {
        const { ground, ink } = this.look.colours(value / this.most);
        pen.fillStyle = ground;
        pen.fillRect(x, y, cellWidth, cellHeight);
        if (hasText) this.writeIn(pen, ink, this.write(value), x, y + cellHeight / 2, "center");
      }
    });
    const below = top + this.depth * (cellHeight + GAP);
    if (row.trouble >= DOUBTED) {
      pen.fillStyle = this.look.bad;
      pen.fillRect(x, below, cellWidth, 3);
    }
    if (hasText) this.writeIn(pen, this.look.text, middle(row.id, Math.floor(cellWidth / 8)), x, below + 10, "center");
  }

  writeIn(pen, ink, text, x, y, align) {
    pen.fillStyle = ink;
    pen.textAlign = align;
    pen.fillText(text, align === "center" ? x + this.at.cellWidth / 2 : x, y, align === "center" ? this.at.cellWidth : undefined);
  }

  /** Labels the cells of each line of columns, except those that stand for other groups in other columns of the line. */
  drawLabels(pen) {
    const { cellHeight, across, lineHeight } = this.at;
    for (let first = 0; first < this.rows.length; first += across) {
      const line = this.rows.slice(first, first + across);
      for (let j = 0; j < this.depth; j += 1) {
        const names = new Set(line.filter((row) => row.groups.length >= j).map((row) => (j ? row.groups[j - 1].name : WHOLE)));
        if (names.size === 1) this.writeIn(pen, this.look.text, [...names][0], 0, (first / across) * lineHeight + j * (cellHeight + GAP) + cellHeight / 2, "left");
      }
    }
  }

  /** Returns the order of the cells in a column, for each model whose groups differ from those of the others. */
  order() {
    const models = new Map();
    for (const row of this.rows) {
      const groups = row.groups.map((group) => `${group.name} ${group.kind}`.trim());
      const { model } = row.worker;
      // A worker that has shown only some of its groups yet does not stand for its model.
      if (groups.length > (models.get(model)?.length ?? 0)) models.set(model, groups);
    }
    const orders = new Map();
    for (const [model, groups] of models) {
      const text = [WHOLE, ...groups].join(", ");
      orders.set(text, [...(orders.get(text) ?? []), middle(model)]);
    }
    if (orders.size < 2) return [...orders.keys()].join("");
    return [...orders].map(([text, names]) => `${names.join(" and ")}: ${text}`).join("; ");
  }

  summary() {
    const values = this.rows.flatMap((row) => this.values(row)).filter((value) => value !== null);
    if (!values.length) return "not known of any worker.";
    const [low, high] = values.reduce(([least, most], value) => [Math.min(least, value), Math.max(most, value)], [Infinity, -Infinity]);
    return `from ${this.write(low)} to ${this.write(high)}.`;
  }

  drawNotes() {
    const order = this.depth > 1 ? ` From the top: ${this.order()}.` : "";
    const about = this.isRelative ? "Blocks held on the GPU; no engine reports how many it has" : MODES[this.mode].about;
    show(this.notes,
      el("span", { class: "scale", role: "img", "aria-label": `from ${this.write(0)} to ${this.write(this.most)}` }, `${this.write(0)} `,
        SCALE.map((part) => el("i", { vars: { "--cell": this.look.colours(part).ground } })), ` ${this.write(this.most)}`),
      el("span", { text: `${about}.${order}` }),
      this.rows.some((row) => row.trouble >= DOUBTED) ? el("span", {}, el("i", { class: "mark" }), " in trouble") : null);
  }

  rowAt(event) {
    const { cellWidth, across, lineHeight, inset } = this.at ?? {};
    if (!across) return null;
    const column = Math.floor((event.offsetX - inset) / (cellWidth + GAP));
    if (column < 0 || column >= across) return null;
    return this.rows[Math.floor(event.offsetY / lineHeight) * across + column] ?? null;
  }

  point(event) {
    const row = this.rowAt(event);
    this.tip.hidden = !row;
    if (!row) return;
    const value = this.values(row)[0];
    const lines = this.mode === "fill"
      ? [`${count(row.held)}${row.capacity ? ` of ${count(row.capacity)} blocks, ${this.write(value)}` : " blocks"}`,
        ...row.groups.map((group) => `${group.name} ${group.kind}: ${count(heldOf(group))}`)]
      : [`${MODES[this.mode].title}: ${this.write(value)}`];
    show(this.tip, el("strong", { text: row.id }), el("div", { text: row.worker.state.replaceAll("_", " ") }),
      lines.map((text) => el("div", { text })));
    const left = Math.min(event.offsetX + 14, this.at.width - this.tip.offsetWidth);
    this.tip.style.setProperty("--x", `${Math.max(0, left)}px`);
    this.tip.style.setProperty("--y", `${event.offsetY + 18}px`);
  }

  /** Shows the same values as a table, for the workers on the page of the table below. Drawn only while it is open. */
  drawTable() {
    if (!this.equal.open || !this.most) return;
    const groups = this.depth > 1 ? [...new Set(this.page.flatMap((row) => row.groups.map((group) => group.name)))].sort() : [];
    const cell = (row, name) => {
      const at = row.groups.findIndex((group) => group.name === name);
      return at < 0 ? "–" : this.write(this.values(row)[at + 1]);
    };
    show(this.equal.lastChild, table({
      caption: `${MODES[this.mode].about}: the workers listed below`,
      columns: [{ name: "Worker" }, ...[groups.length ? WHOLE : MODES[this.mode].title, ...groups].map((name) => ({ name, number: true }))],
      keys: this.page.map((row) => row.key),
      rows: this.page.map((row) => [middle(row.id), this.write(this.values(row)[0]), ...groups.map((name) => cell(row, name))]),
      empty: "No worker.",
    }));
  }
}
