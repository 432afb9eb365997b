// The largest effects of a recording, which set the range of colours.

import { unlessSaid } from "./watch.js";

/** @import { Selection } from "./selection.js" */
/** @import { Source } from "./source.js" */

/**
 * Requests the largest effect of the recording whenever effects are shown.
 * @param {Source} source
 * @param {Selection} selection
 */
export function listenToEffects(source, selection) {
  /** @type {Set<string>} */
  const requested = new Set();
  const need = () => {
    const { recording, effect } = selection;
    const name = `${recording} ${effect}`;
    if (!effect || requested.has(name)) return;
    requested.add(name);
    source.effects({ recording, effect }).then(
      ({ largest }) => selection.learnEffects({ recording, effect, largest }),
      (error) => {
        requested.delete(name);
        unlessSaid(error);
      },
    );
  };
  selection.listen(need);
  need();
}
