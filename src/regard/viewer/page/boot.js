// The page that a server gave.

import { overHttp } from "./data/source.js";
import { elementOf } from "./drawing/dom.js";
import { start } from "./main.js";
import { startTyped } from "./typed.js";

start(elementOf("regard"), overHttp(), { address: true, withInput: startTyped });
