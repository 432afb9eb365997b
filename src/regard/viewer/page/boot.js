// The page that a server gave.

import { start } from "./main.js";
import { overHttp } from "./source.js";

start(document.getElementById("regard"), overHttp(), { address: true });
