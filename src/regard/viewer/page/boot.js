// The page that a server gave.

import { start } from "./main.js";
import { overHttp } from "./data/source.js";

start(document.getElementById("regard"), overHttp(), { address: true });
