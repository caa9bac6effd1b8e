// SPDX-License-Identifier: Apache-2.0
// Buttons that copy a text. One listener serves all of them, so that they may be made again at each update.

import { el } from "./dom.js";

// How long a button says that it was pressed.
const SHOWN_MS = 2000;

let copied = null;

/** label: what is copied, as "the request's id"; shown: the button's text. */
export function copyButton(text, label, shown = "Copy") {
  const done = copied === text;
  return el("button", {
    type: "button", class: "copy", "data-copy": text, "data-label": label, "data-shown": shown,
    "aria-label": done ? `Copied ${label}` : `${shown}: ${label}`, text: done ? "Copied" : shown,
  });
}

const status = el("div", { class: "unseen", role: "status", id: "copied" });

/** Shows the text for the person to copy, as this browser lets no page do it. */
function offer(text, label, from) {
  const area = el("textarea", { readonly: true, "aria-label": label, text });
  const dialog = el("dialog", { class: "panel offer", "aria-label": `Copy ${label}`, on: { close: () => {
    dialog.remove();
    from.focus();
  } } },
  el("p", { text: "This browser lets a page copy only over HTTPS or from localhost. Press Ctrl+C or ⌘C." }), area,
  el("form", { method: "dialog" }, el("button", { text: "Close" })));
  document.body.append(dialog);
  dialog.showModal();
  area.select();
}

/** Without a secure context, as in http://10.0.0.7:30000, there is no clipboard but this. */
function copyOld(text) {
  const focused = document.activeElement;
  const area = el("textarea", { class: "unseen", readonly: true, "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  let done = false;
  try {
    done = document.execCommand("copy");
  } catch {
    // The text is offered instead.
  }
  area.remove();
  focused?.focus();
  return done;
}

async function copy(text) {
  try {
    if (navigator.clipboard) {
      await navigator.clipboard.writeText(text);
      return true;
    }
  } catch {
    // Not permitted: the older way may be.
  }
  return copyOld(text);
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest?.("[data-copy]");
  if (!button) return;
  const { copy: text, label, shown } = button.dataset;
  if (!await copy(text)) {
    offer(text, label, button);
    return;
  }
  copied = text;
  Object.assign(button, { textContent: "Copied", ariaLabel: `Copied ${label}` });
  if (!status.isConnected) document.body.append(status);
  status.textContent = `Copied ${label}.`;
  setTimeout(() => {
    if (copied === text) copied = null;
    if (button.dataset.copy === text) Object.assign(button, { textContent: shown, ariaLabel: `${shown}: ${label}` });
    status.textContent = "";
  }, SHOWN_MS);
});
