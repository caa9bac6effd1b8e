// SPDX-License-Identifier: Apache-2.0
// Elements made of values, and changed in place, so that focus, selection and scroll position survive an update.
// Whatever comes from the API becomes text, never markup.

/** options: class, text, vars (custom properties), on (listeners, of elements that stay), and attributes. */
export function el(tag, options = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") made.className = value;
    else if (name === "text") made.textContent = value;
    else if (name === "vars") for (const [key, property] of Object.entries(value)) made.style.setProperty(key, property);
    else if (name === "on") for (const [event, heard] of Object.entries(value)) made.addEventListener(event, heard);
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

/** Makes the children of `parent` equal to `wanted`; an element of the same tag and data-key is changed, not replaced. */
export function show(parent, ...wanted) {
  const made = el("div", {}, ...wanted);
  const focused = document.activeElement;
  const row = parent.contains(focused) ? focused.closest("[data-row]")?.dataset.row : null;
  changeChildren(parent, [...made.childNodes]);
  // If the focused row moved, another element shows it now, so focus that one.
  if (row && !parent.contains(document.activeElement)) {
    const same = parent.querySelector(`[data-row="${CSS.escape(row)}"]`);
    (same?.matches("a, button") ? same : same?.querySelector("a, button"))?.focus({ preventScroll: true });
  }
}

function changeChildren(parent, wanted) {
  let at = parent.firstChild;
  for (const node of wanted) {
    if (at && alike(at, node)) {
      change(at, node);
      at = at.nextSibling;
    } else {
      parent.insertBefore(node, at);
    }
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

function alike(known, wanted) {
  if (known.nodeName !== wanted.nodeName) return false;
  return known.nodeType !== Node.ELEMENT_NODE || (known.dataset.key === wanted.dataset.key);
}

function change(known, wanted) {
  // Most elements do not change, and the browser's own comparison finds that much faster than the one below.
  if (known.isEqualNode(wanted)) return;
  if (known.nodeType !== Node.ELEMENT_NODE) {
    if (known.data !== wanted.data) known.data = wanted.data;
    return;
  }
  for (const { name } of [...known.attributes]) {
    if (name !== "style" && name !== "open" && !wanted.hasAttribute(name)) known.removeAttribute(name);
  }
  for (const { name, value } of [...wanted.attributes]) {
    if (name !== "style" && known.getAttribute(name) !== value) known.setAttribute(name, value);
  }
  if (known.style.cssText !== wanted.style.cssText) known.style.cssText = wanted.style.cssText;
  changeChildren(known, [...wanted.childNodes]);
}

/** Returns a function that returns whether any of its arguments differs from the last call. Views use it to skip updates,
 * because events come many times a second and change little of what is shown. */
export function changes() {
  let seen = null;
  return (...inputs) => {
    const isChanged = !seen || inputs.some((input, i) => input !== seen[i]);
    seen = inputs;
    return isChanged;
  };
}

/** rows: arrays of cells; a cell is a text, an element, or {number}. The first cell of a row heads it. */
export function table({ caption, columns, rows, cards = false, keys = [], classes = [], empty = "Nothing yet." }) {
  if (!rows.length) return el("p", { class: "quiet", text: empty });
  const head = columns.map((column) => el("th", { scope: "col", class: column.number && "number", text: column.name }));
  const body = rows.map((cells, i) =>
    el("tr", { "data-key": keys[i], class: classes[i] }, cells.map((cell, j) =>
      el(j === 0 ? "th" : "td", {
        scope: j === 0 ? "row" : null,
        class: columns[j].number && "number",
        "data-label": columns[j].name,
      }, cell))));
  const whole = el("table", { class: cards ? "cards" : null },
    el("caption", { text: caption }), el("thead", {}, el("tr", {}, head)), el("tbody", {}, body));
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption }, whole);
}

export function tiles(pairs) {
  return el("dl", { class: "tiles" }, pairs.map(([name, value, unit]) =>
    el("div", { class: "tile" }, el("dt", { text: name }), el("dd", {}, value, unit ? el("span", { text: ` ${unit}` }) : null))));
}

export const pill = (text, tone) => el("span", { class: `pill ${tone}`, text });

/** part: 0 to 1. */
export function meter(part, label) {
  const percent = `${(100 * Math.min(1, Math.max(0, part))).toFixed(1)}%`;
  return el("span", { class: "meter", role: "img", "aria-label": `${label}: ${percent}`, title: `${label}: ${percent}` },
    el("i", { vars: { "--part": percent } }));
}
