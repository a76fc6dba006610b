// Documents, settings and store as tabs: one is shown; the arrow keys lead from one to the next.

import { byId } from "./dom.js";

const STEPS = { ArrowRight: 1, ArrowLeft: -1 };

export function prepareTabs() {
  /** @type {HTMLElement[]} */
  const tabs = [...byId("tabs").children];
  const show = (/** @type {HTMLElement} */ shown) => {
    for (const tab of tabs) {
      tab.setAttribute("aria-selected", String(tab === shown));
      tab.tabIndex = tab === shown ? 0 : -1;
      byId(tab.getAttribute("aria-controls") ?? "").hidden = tab !== shown;
    }
  };
  tabs.forEach((tab, i) => {
    tab.addEventListener("click", () => show(tab));
    tab.addEventListener("keydown", (event) => {
      const step = STEPS[/** @type {keyof typeof STEPS} */ (event.key)];
      if (!step) return;
      const next = tabs[(i + step + tabs.length) % tabs.length];
      show(next);
      next.focus();
    });
  });
}
