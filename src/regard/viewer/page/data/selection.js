// What is chosen on the page, and the address that says so.

const DEFAULTS = {
  view: "map", // or "steps"
  recording: 0,
  layer: 0,
  head: 0,
  query: null, // a position, or none
  key: null,
  plane: "max", // or "mass"
  scale: "weight", // or "uniform"
  side: "to", // what the query attends to; "by": what the key is attended by
  low: null, // the range of colours, log10, where it was edited
  high: null,
  span: null, // the same of a difference: colours reach from −span to span
  compare: "", // "side" or "difference": with
  other: "", // L2H1, or L2H1@1 in the second recording
  x: null, // the map: the token at its left and top, and device pixels for a token
  y: null,
  zoom: null,
};
// Going back undoes these; the others are replaced where they stand.
const STEPS = ["view", "recording", "layer", "head", "query", "key", "compare", "other"];
// Browsers refuse more than some twenty changes of the address a second.
const ADDRESS_MS = 200;

export class Selection extends EventTarget {
  // `about` is the source's; `address`: whether the page's address follows.
  constructor(about, address) {
    super();
    this.about = about;
    this.address = address;
    this.repeats = false; // while a key is held down: no step back for each of its moves
    this.timer = null; // of an address that is not written yet
    Object.assign(this, DEFAULTS, address ? fromHash(location.hash) : {});
    this.#mend();
    if (address) {
      this.goes = () => this.#follow();
      window.addEventListener("popstate", this.goes);
    }
  }

  // Stops following the address.
  end() {
    this.#stopTimer();
    window.removeEventListener("popstate", this.goes);
  }

  // Sets some fields to what exists nearest to it, and tells whoever listens to "change":
  // event.detail is the set of their names. `step`: whether going back may undo it alone.
  set(fields, { step = !this.repeats } = {}) {
    const before = this.#fields();
    Object.assign(this, fields);
    this.#mend();
    const changed = this.#tell(before);
    if (!this.address || changed.size === 0) return;
    const late = this.#stopTimer();
    const write = (how, fields) => history[how](null, "", toHash(fields));
    if (step && STEPS.some((name) => changed.has(name))) {
      if (late) write("replaceState", before);
      write("pushState", this.#fields());
    } else {
      this.timer = setTimeout(() => {
        this.timer = null;
        write("replaceState", this.#fields());
      }, ADDRESS_MS);
    }
  }

  // Tells every field anew, as after a failure.
  again() {
    this.dispatchEvent(new CustomEvent("change", { detail: new Set(Object.keys(DEFAULTS)) }));
  }

  get recordingFacts() {
    return this.about.recordings[this.recording];
  }

  get layerFacts() {
    return this.recordingFacts.layers[this.layer];
  }

  // {recording, layer, head}: what every question to the source starts with.
  get where() {
    return { recording: this.recording, layer: this.layer, head: this.head };
  }

  // The same of what is compared with, or null.
  get otherWhere() {
    const [, layer, head, recording] = /^L(\d+)H(\d+)(?:@(\d+))?$/.exec(this.other) ?? [];
    if (layer === undefined || !this.compare) return null;
    const where = { recording: Number(recording ?? 0), layer: Number(layer), head: Number(head) };
    const heads = this.about.recordings[where.recording]?.layers[where.layer]?.heads ?? 0;
    return where.head < heads ? where : null;
  }

  // `L5H3`.
  get name() {
    return nameOfPlace(this.about, this);
  }

  // Whether the address was behind.
  #stopTimer() {
    const late = this.timer !== null;
    clearTimeout(this.timer);
    this.timer = null;
    return late;
  }

  #follow() {
    this.#stopTimer();
    const before = this.#fields();
    Object.assign(this, DEFAULTS, fromHash(location.hash));
    this.#mend();
    this.#tell(before);
  }

  #fields() {
    return Object.fromEntries(Object.keys(DEFAULTS).map((name) => [name, this[name]]));
  }

  #mend() {
    const inside = (n, count) => Math.max(0, Math.min(Math.round(n) || 0, count - 1));
    this.recording = inside(this.recording, this.about.recordings.length);
    const { tokens, queries, layers } = this.recordingFacts;
    this.layer = inside(this.layer, layers.length);
    this.head = inside(this.head, layers[this.layer].heads);
    if (this.query !== null) this.query = inside(this.query, queries);
    if (this.key !== null) this.key = inside(this.key, tokens);
    for (const [name, known] of Object.entries(CHOICES))
      if (!known.includes(this[name])) this[name] = DEFAULTS[name];
  }

  #tell(before) {
    const names = Object.keys(DEFAULTS).filter((name) => this[name] !== before[name]);
    const changed = new Set(names);
    if (changed.size) this.dispatchEvent(new CustomEvent("change", { detail: changed }));
    return changed;
  }
}

const CHOICES = {
  view: ["map", "steps"],
  plane: ["max", "mass"],
  scale: ["weight", "uniform"],
  side: ["to", "by"],
  compare: ["", "side", "difference"],
};

// `L5H3`. Where only some layers were exported, they keep their numbers.
export function nameOfPlace(about, { recording, layer, head }) {
  return `L${about.recordings[recording].layers[layer]?.number ?? layer}H${head}`;
}

function toHash(fields) {
  const { layer, head, ...rest } = fields;
  const others = Object.entries(rest).filter(([name, value]) => value !== DEFAULTS[name]);
  return `#${[`L${layer}H${head}`, ...others.map(([k, v]) => `${k}=${encodeURIComponent(v)}`)].join("&")}`;
}

function fromHash(hash) {
  const fields = {};
  for (const part of hash.slice(1).split("&")) {
    const place = /^L(\d+)H(\d+)$/.exec(part);
    if (place) [fields.layer, fields.head] = [Number(place[1]), Number(place[2])];
    const [name, value] = part.split("=");
    if (value === undefined || !(name in DEFAULTS)) continue;
    const text = decoded(value);
    const isText = typeof DEFAULTS[name] === "string";
    if (isText) fields[name] = text;
    else if (text !== "" && Number.isFinite(Number(text))) fields[name] = Number(text);
  }
  return fields;
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return "";
  }
}
