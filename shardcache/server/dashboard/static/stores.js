// The origins: their connections, the bytes from each source, and the counters of repeated work.

import { byId, definitions, say, table } from "./dom.js";
import { number, size } from "./words.js";

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
  corrupt: "corrupt",
};

const SOURCES = { hit_bytes: "from the cache", tier_bytes: "from the tier", origin_bytes: "from origins" };

export function showStores({ origins, tiers, counters }) {
  table(byId("store-rows"), origins, (row) => row.name, COLUMNS, "No requests yet.");
  const sources = Object.entries(SOURCES).filter(([name]) => tiers?.length || name !== "tier_bytes");
  definitions(byId("counters"), [
    ...sources.map(([name, word]) => [word, size(counters[name] ?? 0)]),
    ...Object.entries(COUNTERS).map(([name, word]) => [word, number(counters[name] ?? 0)]),
  ]);
}
