// The traffic: the download rate, and the origins with their connections and counters.

import { brush, byId, colour, definitions, setText, table } from "./dom.js";
import { number, size } from "./words.js";

const KEPT = 120;
const MARGIN = 16;

/** The download rate, from the origins and the tier, over the last two minutes, in bytes per second. */
export class Rates {
  constructor(canvas, text) {
    this.canvas = canvas;
    this.text = text;
    this.values = [];
    this.previous = null;
  }

  /** The latest rate. */
  get now() { return this.values.at(-1) ?? 0; }

  /** Add a moment's counter; after a restart of the daemon, start over. */
  take({ uptime_s, counters }) {
    const previous = this.previous;
    const bytes = counters.origin_bytes + (counters.tier_bytes ?? 0);
    this.previous = { at: uptime_s, bytes };
    if (previous === null || previous.at === uptime_s) return;
    if (previous.at > uptime_s) { this.values = []; return; }
    this.values.push(Math.max(0, (bytes - previous.bytes) / (uptime_s - previous.at)));
    this.values.splice(0, this.values.length - KEPT);
    this.draw();
  }

  draw() {
    const area = brush(this.canvas), most = Math.max(0, ...this.values);
    this.text.textContent = `now ${size(this.now)}/s, peak ${size(most)}/s in the last ${this.values.length} s`;
    if (area === null) return;
    const { context, width, height } = area, top = ceiling(most), room = height - MARGIN;
    grid(context, width, room, top);
    const x = (index) => width - ((this.values.length - 1 - index) * width) / (KEPT - 1);
    const y = (value) => MARGIN + (room - MARGIN) * (1 - value / top);
    context.beginPath();
    this.values.forEach((value, index) => context.lineTo(x(index), y(value)));
    context.strokeStyle = colour("--rate");
    context.lineWidth = 1.5;
    context.stroke();
    context.lineTo(width, room);
    context.lineTo(x(0), room);
    context.fillStyle = colour("--rate-area");
    context.fill();
  }
}

function grid(context, width, room, top) {
  context.fillStyle = colour("--quiet");
  context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  context.fillText(`${size(top)}/s`, 0, MARGIN - 5);
  context.fillText("2 min ago", 0, room + 13);
  context.textAlign = "right";
  context.fillText("now", width, room + 13);
  context.textAlign = "left";
  context.fillStyle = colour("--line");
  for (const share of [0, 0.5, 1]) context.fillRect(0, Math.round(MARGIN + (room - MARGIN) * share), width, 1);
}

/** The next 1, 2 or 5 times a power of ten, so that the axis rarely changes. */
function ceiling(value) {
  if (value < 1000) return 1000;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((step) => step * power >= value);
}

const COLUMNS = [
  { header: true, name: "name", fill: (cell, row) => { setText(cell, row.name); cell.title = row.name; } },
  { name: "number", fill: (cell, row) => setText(cell, number(row.connections)) },
  { name: "number", fill: (cell, row) => setText(cell, number(row.limit)) },
  { name: "number", fill: (cell, row) => setText(cell, number(row.throttled)) },
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
