// The page of an exported file, which holds its recordings.

import { elementOf } from "./drawing/dom.js";
import { start } from "./main.js";
import { overLocal } from "./offline/local.js";

/** @import { PackedData } from "./offline/local.js" */

const textOf = (/** @type {string} */ name) => elementOf(name).textContent ?? "";
/** @type {PackedData} */
const data = JSON.parse(textOf("regard-data"));

start(elementOf("regard"), overLocal(data, textOf), { address: true });
