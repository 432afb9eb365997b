// The page of an exported file, which holds its recordings.

import { start } from "./main.js";
import { overLocal } from "./offline/local.js";

const data = JSON.parse(document.getElementById("regard-data").textContent);
const textOf = (name) => document.getElementById(name).textContent;

start(document.getElementById("regard"), overLocal(data, textOf), { address: true });
