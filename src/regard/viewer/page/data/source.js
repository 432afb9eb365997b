// Where the page's numbers come from. `ask(path, parameters, signal)` gives {body: ArrayBuffer,
// coverage: number}: over HTTP, from a notebook's kernel, or computed here (local.js).

const TILE = 256; // bins on a side
const MOST_TILES = 512; // kept: 128 MB

export class Source {
  constructor(ask) {
    this.ask = ask;
    this.kept = new Map(); // exact answers by their address, the latest used last
    this.asked = new Map(); // promises under way
  }

  about() {
    return this.#json("about", {});
  }

  // The texts of a recording's keys, or of its queries.
  tokens(recording, side = "key") {
    return this.#json("tokens", { recording, side });
  }

  // ln of the weights of 256 × 256 bins of 2^level tokens: {values, coverage}. NaN: invisible.
  tile(where, signal) {
    return this.#floats("tile", where, signal);
  }

  // The tile where it is known already, else undefined.
  knownTile(where) {
    return this.kept.get(address("tile", where));
  }

  // ln of the weights that a query gives to every key: {values, coverage}.
  row(where, signal) {
    return this.#floats("row", where, signal);
  }

  // ln of the weights that a key gets from every query.
  column(where, signal) {
    return this.#floats("column", where, signal);
  }

  // How many keys each query sees.
  visible(where) {
    return this.#floats("visible", where);
  }

  // ln of the weight of one pair in every head of every layer, layer after layer.
  pair(where, signal) {
    return this.#floats("pair", where, signal);
  }

  // {links: [[query, key, ln weight], …], coverage}, strongest first; of a part where `rows` and
  // `columns` are given, as "from-to".
  links(where, signal) {
    return this.#json("links", where, signal);
  }

  // What every head of a layer does: thumbnails and scores.
  async heads(where) {
    const found = await this.#json("heads", where);
    const bytes = Uint8Array.from(atob(found.thumbnails), (c) => c.charCodeAt(0));
    return { ...found, thumbnails: new Float32Array(bytes.buffer) };
  }

  // Every step of some queries and keys of a head, as lists of numbers.
  steps(where, signal) {
    const number = (_, x) => (x === "NaN" || x === "Infinity" ? Number(x) : x);
    return this.#json("steps", where, signal, number);
  }

  async #json(path, parameters, signal, revive) {
    const decode = ({ body }) => JSON.parse(new TextDecoder().decode(body), revive);
    return this.#get(path, parameters, signal, decode);
  }

  async #floats(path, parameters, signal) {
    const decode = ({ body, coverage }) => ({ values: new Float32Array(body), coverage });
    return this.#get(path, parameters, signal, decode);
  }

  async #get(path, parameters, signal, decode) {
    const name = address(path, parameters);
    const known = this.kept.get(name);
    if (known !== undefined) {
      this.kept.delete(name);
      this.kept.set(name, known);
      return known;
    }
    if (this.asked.has(name)) return this.asked.get(name);
    const promise = this.ask(path, parameters, signal).then(decode);
    this.asked.set(name, promise);
    try {
      const answer = await promise;
      if ((answer.coverage ?? 1) === 1) this.kept.set(name, answer);
      if (this.kept.size > MOST_TILES) this.kept.delete(this.kept.keys().next().value);
      return answer;
    } finally {
      this.asked.delete(name);
    }
  }
}

function address(path, parameters) {
  const given = Object.entries(parameters).filter(([, value]) => value !== undefined);
  return `${path}?${new URLSearchParams(given)}`;
}

// The `ask` of a page that a server gave.
export function overHttp() {
  return async (path, parameters, signal) => {
    const answer = await fetch(`data/${address(path, parameters)}`, { signal });
    if (!answer.ok) throw new Error(await answer.text());
    return {
      body: await answer.arrayBuffer(),
      coverage: Number(answer.headers.get("Regard-Coverage") ?? 1),
    };
  };
}

export { TILE };
