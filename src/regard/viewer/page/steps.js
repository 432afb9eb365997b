// Every step of one head.

import { make } from "./dom.js";

export function makeSteps() {
  return { element: make("section", { class: "regard-steps", "aria-label": "Steps" }) };
}
