// Slices of computing, one at a time, with time for the page between them.

/** @typedef {0 | 1} Patience SOON or LATER */

const SLICE_MS = 10; // of computing, before the page may draw and listen again
/** @type {Patience} */
export const SOON = 0; // what the page waits for
/** @type {Patience} */
export const LATER = 1; // what it can do without for now

/** @typedef {{resolve: () => void, reject: (why: Error) => void, signal?: AbortSignal}} Waiting */

// What it waits for comes first.
export class LocalTurns {
  constructor() {
    this.since = -Infinity;
    /** @type {[soon: Waiting[], later: Waiting[]]} */
    this.waiting = [[], []];
    this.channel = new MessageChannel();
    this.channel.port1.onmessage = () => this.#next();
  }

  get isOver() {
    return performance.now() - this.since > SLICE_MS;
  }

  /**
   * @param {Patience} patience
   * @param {AbortSignal} [signal]
   * @returns {Promise<void>}
   */
  wait(patience, signal) {
    return new Promise((resolve, reject) => {
      this.waiting[patience].push({ resolve, reject, signal });
      this.channel.port2.postMessage(null);
    });
  }

  #next() {
    const next = this.waiting[SOON].shift() ?? this.waiting[LATER].shift();
    if (!next) return;
    const { resolve, reject, signal } = next;
    this.since = performance.now();
    if (signal?.aborted) reject(new DOMException("no longer needed", "AbortError"));
    else resolve();
  }
}
