// The map of the cache: one cell per shard in name order, coloured by when it is needed next.

import { brush, byId, colour, number, setText, size } from "./dom.js";

// Colours of the daemon's bands (cache/views/shard_map.py), from -1, which is leased; their words are in the table.
const BANDS = ["--band-leased", "--band-0", "--band-1", "--band-2", "--band-3", "--band-4", "--band-none"];
const LARGEST = 18, SMALLEST = 3, TALLEST = 300;
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const HINT = "Each cell is a shard: point at one, or move with the arrow keys, to see its name.";

export class CacheMap {
  shards = 0;
  cells = []; // in name order: { url, band, bytes, pinned }
  chosen = -1; // index of a cell
  wanted = "";

  constructor(canvas) {
    this.canvas = canvas;
    canvas.addEventListener("pointermove", (event) => this.choose(this.at(event.offsetX, event.offsetY)));
    canvas.addEventListener("keydown", (event) => this.key(event));
    byId("find-text").addEventListener("input", ({ target }) => {
      this.wanted = target.value.trim();
      this.draw();
      this.describe();
    });
  }

  /** Show another state of the cache; the chosen shard stays chosen. */
  take({ shards, folders }) {
    const url = this.cells[this.chosen]?.url;
    this.shards = shards;
    this.cells = Object.entries(folders).flatMap(([folder, rows]) => (
      rows.map(([name, band, bytes, pinned]) => ({ url: folder + name, band, bytes, pinned }))
    )).sort((a, b) => (a.url < b.url ? -1 : Number(a.url > b.url)));
    this.chosen = this.cells.findIndex((cell) => cell.url === url);
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
    const tones = BANDS.map(colour), ink = colour("--pin");
    const corner = (index) => [(index % this.columns) * this.step, Math.floor(index / this.columns) * this.step];
    this.cells.forEach((cell, index) => {
      context.globalAlpha = this.wanted && !cell.url.includes(this.wanted) ? 0.15 : 1;
      context.fillStyle = tones[cell.band + 1];
      context.fillRect(...corner(index), inner, inner);
      if (cell.pinned) pin(context, ...corner(index), inner, ink);
    });
    context.globalAlpha = 1;
    if (this.chosen < 0) return;
    context.strokeStyle = colour("--ink");
    context.lineWidth = 2;
    context.strokeRect(...corner(this.chosen), inner, inner);
  }

  count() {
    const sum = (cells) => size(cells.reduce((total, { bytes }) => total + bytes, 0));
    [...byId("band-rows").rows].forEach((row, at) => {
      const cells = this.cells.filter(({ band }) => band + 1 === at);
      setText(row.cells[1], number(cells.length));
      setText(row.cells[2], sum(cells));
    });
    const kept = this.cells.filter(({ pinned }) => pinned);
    setText(byId("pinned"), kept.length ? `${number(kept.length)} pinned, ${sum(kept)}; marked at the corner` : "");
  }

  at(x, y) { return Math.floor(y / this.step) * this.columns + Math.min(this.columns - 1, Math.floor(x / this.step)); }

  key(event) {
    const [across, down] = ARROWS[event.key] ?? [], last = this.cells.length - 1;
    if (event.key === "Escape") this.choose(-1);
    else if (event.key === "Home") this.choose(0);
    else if (event.key === "End") this.choose(last);
    else if (across === undefined) return;
    else this.choose(this.chosen < 0 ? 0 : Math.max(0, Math.min(last, this.chosen + across + down * this.columns)));
    event.preventDefault();
  }

  choose(index) {
    const chosen = index < this.cells.length ? index : -1;
    if (chosen === this.chosen) return;
    this.chosen = chosen;
    this.draw();
    this.describe();
  }

  /** Describe the chosen cell, the search result, or how much of the cache is shown. */
  describe() {
    const cell = this.cells[this.chosen], shown = this.cells.length;
    const share = shown < this.shards ? `${number(shown)} of ${number(this.shards)} shards are shown. ` : "";
    setText(byId("cell"), cell ? nameOf(cell) : this.wanted ? this.found() : share + HINT);
  }

  found() {
    const found = this.cells.filter(({ url }) => url.includes(this.wanted));
    if (!found.length) return "no cached shard matches";
    return `${number(found.length)} found; the first is ${found[0].url}, needed ${wordOf(found[0].band)}`;
  }
}

const wordOf = (band) => (band === -1 ? "now: being read" : byId("band-rows").rows[band + 1].cells[0].textContent);

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
