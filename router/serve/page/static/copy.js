// SPDX-License-Identifier: Apache-2.0
// Buttons that copy a text. One listener on the document serves all of them, so each update may create them again.

import { el } from "./dom.js";

// How long a button shows that its text was copied.
const SHOWN_MS = 2000;

let copied = null;

/** text: the text to copy; label: its name, such as "the request's id"; shown: the button's text. */
export function copyButton(text, label, shown = "Copy") {
  const done = copied === text;
  return el("button", {
    type: "button", class: "copy", "data-copy": text, "data-label": label, "data-shown": shown,
    "aria-label": done ? `Copied ${label}` : `${shown}: ${label}`, text: done ? "Copied" : shown,
  });
}

const status = el("div", { class: "unseen", role: "status", id: "copied" });

/** Shows the text in a dialog for the person to copy, because this browser does not let the page do it. */
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

/** Copies in the older way, the only one without a secure context, as at http://10.0.0.7:30000. Returns whether it worked. */
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
    // The caller shows the text instead.
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
    // This way is not permitted; the older one may be.
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
