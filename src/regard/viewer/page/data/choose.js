// Choosing where nothing is chosen yet.

import { largest } from "../drawing/numbers.js";

// The last query that sees something, and its strongest key; going back does not undo it.
export async function chooseFirst({ selection, source }) {
  if (selection.query !== null && selection.key !== null) return;
  const where = selection.where;
  const query = selection.query ?? lastSeeing((await source.visible(where)).values);
  const { values } = await source.row({ ...where, query });
  if (!isStill(selection, where)) return chooseFirst({ selection, source });
  if (selection.query !== null && selection.key !== null) return;
  selection.set({ query, key: selection.key ?? largest(values, 1)[0] ?? 0 }, { step: false });
}

// Looks from a query at its strongest key.
export async function lookFrom({ selection, source }, query) {
  const where = selection.where;
  const { values } = await source.row({ ...where, query });
  if (!isStill(selection, where)) return;
  selection.set({ query, key: largest(values, 1)[0] ?? selection.key ?? 0 });
}

// Looks at a key from the query that gives it most.
export async function lookAt(context, key) {
  const { selection, source } = context;
  const where = selection.where;
  const { values, coverage } = await source.column({ ...where, key });
  if (!isStill(selection, where)) return;
  if (coverage < 1) context.because = "the strongest of the rows read so far";
  selection.set({ key, query: largest(values, 1)[0] ?? selection.query ?? 0 });
}

function isStill(selection, where) {
  return Object.entries(where).every(([name, value]) => selection[name] === value);
}

function lastSeeing(counts) {
  const last = counts.findLastIndex((count) => count > 0);
  return last < 0 ? counts.length - 1 : last;
}
