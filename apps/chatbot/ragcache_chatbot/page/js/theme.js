// Light or dark: the system's choice until the reader makes one. Runs before the first paint.

import { icon } from "./icons.js";

const STORED = "ragcache.theme";
const system = matchMedia("(prefers-color-scheme: dark)");

/** @returns {"light" | "dark"} */
function theme() {
  const chosen = localStorage.getItem(STORED);
  return chosen === "light" || chosen === "dark" ? chosen : system.matches ? "dark" : "light";
}

function show() {
  const now = theme();
  document.documentElement.dataset.theme = now;
  const button = document.getElementById("theme");
  if (!button) return;
  button.setAttribute("aria-label", now === "dark" ? "Light theme" : "Dark theme");
  button.replaceChildren(icon(now === "dark" ? "sun" : "moon"));
}

function toggle() {
  const next = theme() === "dark" ? "light" : "dark";
  // Choosing what the system has means following the system again.
  if (next === (system.matches ? "dark" : "light")) localStorage.removeItem(STORED);
  else localStorage.setItem(STORED, next);
  show();
}

show();
system.addEventListener("change", show);
document.getElementById("theme")?.addEventListener("click", toggle);
