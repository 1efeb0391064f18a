// The map of the cache: one cell per shard in name order, coloured by when it is needed next.

import { brush, byId, colour, make, setText, sync } from "./dom.js";
import { number, size } from "./words.js";

// The daemon's bands, see shardcache/cache/views.py: -1 is leased.
const BANDS = [
  [-1, "being read", "--band-leased"],
  [0, "within a minute", "--band-0"],
  [1, "within 5 minutes", "--band-1"],
  [2, "within 15 minutes", "--band-2"],
  [3, "within the hour", "--band-3"],
  [4, "later", "--band-4"],
  [5, "in no plan", "--band-none"],
];
const LARGEST = 18, SMALLEST = 3, TALLEST = 300;
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

export class CacheMap {
  constructor() {
    this.shards = 0;
    this.cells = []; // in name order: { url, band, bytes, pinned }
    this.chosen = -1; // index of a cell
    this.wanted = "";
    this.canvas = byId("map");
    this.canvas.addEventListener("pointermove", (event) => this.choose(this.at(event.offsetX, event.offsetY)));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    byId("find").addEventListener("submit", (event) => event.preventDefault());
    byId("find-text").addEventListener("input", (event) => this.find(event.target.value.trim()));
  }

  /** Show another state of the cache; the chosen shard stays chosen. */
  take({ shards, folders }) {
    const url = this.cells[this.chosen]?.url;
    this.shards = shards;
    this.cells = Object.entries(folders).flatMap(([folder, rows]) => (
      rows.map(([name, band, bytes, pinned]) => ({ url: folder + name, band, bytes, pinned }))
    )).sort((a, b) => (a.url < b.url ? -1 : Number(a.url > b.url)));
    if (url !== undefined && this.cells[this.chosen]?.url !== url) {
      this.chosen = this.cells.findIndex((cell) => cell.url === url);
    }
    this.arrange();
    if (this.chosen < 0 && !this.wanted) this.describe();
  }

  /** Lay all cells out and draw them. */
  arrange() {
    const width = this.canvas.clientWidth, cells = Math.max(1, this.cells.length);
    if (!width) return;
    const fitting = Math.floor(Math.sqrt((width * TALLEST) / cells));
    this.step = Math.max(SMALLEST, Math.min(LARGEST, fitting));
    this.columns = Math.max(1, Math.floor(width / this.step));
    this.canvas.style.height = `${Math.ceil(cells / this.columns) * this.step + 2}px`;
    this.draw();
    this.count();
  }

  draw() {
    const area = brush(this.canvas);
    if (area === null) return;
    const { context } = area, inner = this.step - (this.step > 4 ? 1 : 0.5);
    const ink = colour("--pin"), colours = new Map(BANDS.map(([band, , name]) => [band, colour(name)]));
    this.cells.forEach((cell, index) => {
      context.globalAlpha = this.wanted && !cell.url.includes(this.wanted) ? 0.15 : 1;
      context.fillStyle = colours.get(cell.band);
      const x = (index % this.columns) * this.step, y = Math.floor(index / this.columns) * this.step;
      context.fillRect(x, y, inner, inner);
      if (cell.pinned) pin(context, x, y, inner, ink);
    });
    context.globalAlpha = 1;
    const index = this.chosen;
    if (index < 0) return;
    context.strokeStyle = colour("--ink");
    context.lineWidth = 2;
    context.strokeRect((index % this.columns) * this.step, Math.floor(index / this.columns) * this.step, inner, inner);
  }

  count() {
    const totals = new Map(BANDS.map(([band]) => [band, [0, 0]]));
    for (const { band, bytes } of this.cells) {
      const total = totals.get(band);
      total[0] += 1;
      total[1] += bytes;
    }
    sync(byId("band-rows"), BANDS, ([band]) => String(band), newBand, (row, [band]) => {
      const [shards, bytes] = totals.get(band);
      setText(row.children[1], number(shards));
      setText(row.children[2], size(bytes));
    });
    const kept = this.cells.filter((cell) => cell.pinned), bytes = kept.reduce((total, cell) => total + cell.bytes, 0);
    setText(byId("pinned"), kept.length ? `${number(kept.length)} pinned, ${size(bytes)}; marked at the corner` : "");
  }

  at(x, y) { return Math.floor(y / this.step) * this.columns + Math.min(this.columns - 1, Math.floor(x / this.step)); }

  key(event) {
    const arrow = ARROWS[event.key];
    if (event.key === "Escape") this.choose(-1);
    else if (event.key === "Home") this.choose(0);
    else if (event.key === "End") this.choose(this.cells.length - 1);
    else if (arrow) this.choose(this.chosen < 0 ? 0 : this.beside(arrow));
    else return;
    event.preventDefault();
  }

  beside([across, down]) {
    return Math.max(0, Math.min(this.cells.length - 1, this.chosen + across + down * this.columns));
  }

  choose(index) {
    const chosen = index < this.cells.length ? index : -1;
    if (chosen === this.chosen) return;
    this.chosen = chosen;
    this.draw();
    this.describe();
  }

  find(text) {
    this.wanted = text;
    this.draw();
    this.describe();
  }

  /** Describe the chosen cell, the search result, or how much of the cache is shown. */
  describe() {
    const cell = this.cells[this.chosen];
    setText(byId("cell"), cell ? nameOf(cell) : this.wanted ? this.found() : this.share());
  }

  found() {
    const found = this.cells.filter(({ url }) => url.includes(this.wanted));
    if (!found.length) return "no cached shard matches";
    return `${number(found.length)} found; the first is ${found[0].url}, needed ${wordOf(found[0].band)}`;
  }

  share() {
    const hint = "Each cell is a shard: point at one, or move with the arrow keys, to see its name.";
    const shown = this.cells.length;
    return shown < this.shards ? `${number(shown)} of ${number(this.shards)} shards are shown. ${hint}` : hint;
  }
}

function nameOf({ url, bytes, band, pinned }) {
  return `${url} · ${size(bytes)} · needed ${wordOf(band)}${pinned ? " · pinned" : ""}`;
}

/** A pinned shard's mark: the corner of its cell. */
function pin(context, x, y, side, ink) {
  const reach = Math.max(2, side * 0.45);
  context.fillStyle = ink;
  context.beginPath();
  context.moveTo(x + side, y);
  context.lineTo(x + side, y + reach);
  context.lineTo(x + side - reach, y);
  context.fill();
}

const wordOf = (wanted) => (wanted === -1 ? "now: being read" : BANDS.find(([band]) => band === wanted)[1]);

function newBand([, word, name]) {
  const swatch = make("span", { class: "swatch" });
  swatch.style.background = `var(${name})`;
  return make("tr", {}, make("th", { scope: "row" }, swatch, word), make("td"), make("td"));
}
