// The origins: their connections, and the counters of repeated work.

import { byId, definitions, say, table } from "./dom.js";
import { number } from "./words.js";

const COLUMNS = [
  { header: true, name: "name", fill: (cell, row) => { say(cell, row.name); cell.title = row.name; } },
  { name: "number", fill: (cell, row) => say(cell, number(row.connections)) },
  { name: "number", fill: (cell, row) => say(cell, number(row.limit)) },
  { name: "number", fill: (cell, row) => say(cell, number(row.throttled)) },
];

const COUNTERS = {
  evictions: "evicted",
  refetches: "re-fetched",
  retries: "retries",
  hedges: "hedged",
  corrupt: "damaged",
};

export function showStores({ origins, counters }) {
  table(byId("store-rows"), origins, (row) => row.name, COLUMNS, "No requests yet.");
  definitions(byId("counters"), Object.entries(COUNTERS).map(([name, word]) => [word, number(counters[name] ?? 0)]));
}
