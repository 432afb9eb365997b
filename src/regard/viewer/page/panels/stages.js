// The stages of the scores, from q·kᵀ to what softmax takes: one picture of them, and a switch.

import { make } from "../drawing/dom.js";
import { scalingText } from "./arithmetic.js";

/** @import { LayerFacts, Steps } from "../data/source.js" */

/** @typedef {"scores" | "scaled" | "capped" | "biased" | "edited" | "masked"} Stage */

/** @type {Stage[]} in their order */
export const STAGES = ["scores", "scaled", "capped", "biased", "edited", "masked"];

/**
 * The stages that the steps have; without a masked pair the last but one is the last.
 * @param {Steps} steps
 */
export function stagesOf(steps) {
  const isMasked = steps.masked.some((row) => row.includes(null));
  return STAGES.filter((stage) => steps[stage] && (stage !== "masked" || isMasked));
}

/**
 * The sign of each stage in the formula.
 * @param {LayerFacts} facts
 * @returns {Record<Stage, string>}
 */
export function stageSigns(facts) {
  return {
    scores: "scores",
    scaled: scalingText(facts),
    capped: facts.capped?.match(/\w+(?=\()/)?.[0] ?? "", // its function
    biased: "+ bias",
    edited: "+ edits",
    masked: "mask",
  };
}

/**
 * A switch of the stages, as the formula goes on: {element, show(stages, chosen, facts)}.
 * @param {(stage: Stage) => void} choose
 */
export function makeStages(choose) {
  const buttons = new Map(
    STAGES.map((stage) => {
      const onclick = () => choose(stage);
      return [stage, make("button", { type: "button", "data-stage": stage, onclick })];
    }),
  );
  const element = make(
    "span",
    { class: "regard-switch regard-stages", role: "group", "aria-label": "Stage of the scores" },
    ...buttons.values(),
  );
  /** @type {(stages: Stage[], chosen: Stage, facts: LayerFacts) => void} */
  const show = (stages, chosen, facts) => {
    const signs = stageSigns(facts);
    for (const [stage, button] of buttons) {
      button.hidden = !stages.includes(stage);
      button.textContent = signs[stage];
      button.title = titleOf(stage, facts);
      button.setAttribute("aria-pressed", String(stage === chosen));
    }
  };
  return { element, show };
}

/**
 * @param {Stage} stage
 * @param {LayerFacts} facts
 */
function titleOf(stage, facts) {
  const capped = facts.capped?.replaceAll("*", "·").replaceAll("/", "÷") ?? "";
  const does = {
    scores: "query · key",
    scaled: `scores ${scalingText(facts)}`,
    capped: capped.replaceAll("{}", "scaled"),
    biased: `${facts.capped === null ? "scaled" : "capped"} + bias`,
    edited: "+ ln(factor) of the edits",
    masked: "grey: the query does not attend to the key",
  };
  return `${stage}: ${does[stage]}`;
}
