// SPDX-License-Identifier: Apache-2.0
// Keyboard shortcuts. They do nothing while the person types in a field.

import { el } from "./dom.js";

const FILTER = "input[type=search]";
const FOCUSABLE = "a[href], button, [tabindex]";

const shortcuts = (views) => [
  ["/", "filter the list"],
  ["j", "next row"],
  ["k", "previous row"],
  ["Enter", "open the row"],
  [`1 to ${views.length}`, views.map((view) => view.title).join(", ")],
  ["Esc", "leave the filter, or close the open details"],
  ["?", "show these shortcuts"],
];

const isWriting = (node) => node.isContentEditable || node.matches("input:not([type=radio], [type=checkbox]), select, textarea");

/** Focuses the next (1) or previous (-1) row of the view, [data-row]: the row itself, or its first focusable element. */
function step(root, by) {
  const rows = [...root.querySelectorAll("[data-row]")].filter((row) => row.checkVisibility());
  const at = rows.findIndex((row) => row.contains(document.activeElement));
  const row = rows[at < 0 ? (by > 0 ? 0 : rows.length - 1) : Math.min(rows.length - 1, Math.max(0, at + by))];
  const target = row?.matches(FOCUSABLE) ? row : row?.querySelector(FOCUSABLE);
  target?.focus({ preventScroll: true });
  row?.scrollIntoView({ block: "nearest" });
}

/** Shows the shortcuts in a dialog. */
export function showShortcuts(views) {
  const dialog = el("dialog", { id: "shortcuts", "aria-labelledby": "shortcuts-title", on: { close: () => dialog.remove() } },
    el("h2", { id: "shortcuts-title", text: "Keyboard shortcuts" }),
    el("dl", { class: "keys" }, shortcuts(views).map(([keys, text]) => [el("dt", {}, el("kbd", { text: keys })), el("dd", { text })])),
    el("form", { method: "dialog" }, el("button", { text: "Close" })));
  document.body.append(dialog);
  dialog.showModal();
}

/** views: all views; root: the element of the present view; close: closes whatever is open in it. */
export function listenToKeys({ views, root, close }) {
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    const node = document.activeElement;
    if (event.key === "Escape") {
      if (node.matches(FILTER)) node.blur();
      else close();
      return;
    }
    if (isWriting(node)) return;
    const number = Number(event.key);
    if (event.key === "/") root.querySelector(FILTER)?.focus();
    else if (event.key === "j") step(root, 1);
    else if (event.key === "k") step(root, -1);
    else if (event.key === "?") showShortcuts(views);
    else if (views[number - 1]) location.hash = views[number - 1].id;
    else return;
    event.preventDefault();
  });
}
