// An error in its place, with what to do.

import { element } from "./dom.js";
import { explain } from "./errors.js";

/** @param {unknown} error @param {(() => void) | null} retry left out where the same again would fail again */
export function troubleBox(error, retry) {
  const { message, advice, mayPass } = explain(error);
  const again = retry && mayPass && element("button", { type: "button", class: "small", onclick: retry }, "Try again");
  return element("div", { class: "trouble", role: "alert" }, element("strong", {}, message), element("span", {}, advice), again);
}
