// The page that a server gave.

import { overHttp } from "./data/source.js";
import { start } from "./main.js";

start(document.getElementById("regard"), overHttp(), { address: true });
