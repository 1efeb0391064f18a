// The stores: their connections, and what had to be done more than once.

import { byId, definitions, say, table } from "./dom.js";
import { number } from "./words.js";

const COLUMNS = [
  { header: true, name: "name", fill: (cell, row) => { say(cell, row.name); cell.title = row.name; } },
  { name: "number", fill: (cell, row) => say(cell, number(row.connections)) },
  { name: "number", fill: (cell, row) => say(cell, number(row.limit)) },
  { name: "number", fill: (cell, row) => say(cell, number(row.busy)) },
];

const COUNTERS = {
  evictions: "evicted",
  regrets: "needed again",
  retries: "parts retried",
  hedges: "asked twice",
  corrupt: "found corrupt",
};

export function showStores({ origins, counters }) {
  table(byId("store-rows"), origins, (row) => row.name, COLUMNS, "None was asked for anything yet.");
  definitions(byId("counters"), Object.entries(COUNTERS).map(([name, word]) => [word, number(counters[name] ?? 0)]));
}
