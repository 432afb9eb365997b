// A cooperative scheduler: time slices of computing, with time for the page between them.

/** @typedef {0 | 1} Priority SOON or LATER */

const SLICE_MS = 10; // of computing, before the page may draw and listen again
/** @type {Priority} */
export const SOON = 0; // what the page waits for
/** @type {Priority} */
export const LATER = 1; // what it can do without for now

/** @typedef {{resolve: () => void, reject: (why: Error) => void, signal?: AbortSignal}} Waiting */

// Two queues; SOON comes first.
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
   * @param {Priority} priority
   * @param {AbortSignal} [signal]
   * @returns {Promise<void>}
   */
  wait(priority, signal) {
    return new Promise((resolve, reject) => {
      this.waiting[priority].push({ resolve, reject, signal });
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
