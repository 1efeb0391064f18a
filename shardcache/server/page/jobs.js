// The jobs: the current state of each, and its next five minutes as a strip.

import { brush, byId, colour, make, setText, sync, table } from "./dom.js";
import { byJob, isLong, isStalled, keyOf } from "./waiting.js";
import { basename, count, duration, neededIn, number, pace } from "./words.js";

const HORIZON_S = 300;
const PRESENCES = [["cached", "cached"], ["fetching", "being fetched"], ["missing", "missing"]];
const MARK = 4;

const jobKey = (job) => keyOf(job.name, job.uid);
const sum = (counts) => counts.reduce((total, value) => total + value, 0);

const COLUMNS = [
  { header: true, fill: (cell, { job }) => lines(cell, job.name, job.user) },
  { name: "now", fill: fillNow },
  { name: "number", fill: (cell, { job }) => setText(cell, number(job.sessions)) },
  { name: "number", fill: (cell, { job }) => setText(cell, `${number(job.shards_done)} of ${number(job.shards_planned)}`) },
  { name: "number", fill: (cell, { job }) => setText(cell, pace(job.shards_per_s)) },
  { name: "number", fill: (cell, { job }) => setText(cell, job.ahead_s === null ? "all cached" : neededIn(job.ahead_s)) },
  { name: "number", fill: fillWaited },
  { name: "lane", fill: fillLane },
];

export function showJobs({ jobs, waits, lanes }) {
  const laneOf = new Map(lanes.map((lane) => [jobKey(lane), lane])), waitOf = byJob(waits);
  const present = jobs.filter((job) => job.sessions > 0).map((job) => {
    const key = jobKey(job);
    return { key, job, lane: laneOf.get(key), wait: waitOf.get(key) };
  });
  table(byId("job-rows"), present, ({ key }) => key, COLUMNS, "No job is connected.");
  showPast(jobs.filter((job) => job.sessions === 0));
  legend();
}

function lines(cell, first, second) {
  if (!cell.firstChild) cell.append(make("span"), make("span", { class: "small" }));
  setText(cell.children[0], first);
  setText(cell.children[1], second);
}

function fillNow(cell, { job, wait }) {
  const waits = wait !== undefined && isLong(wait); // as in the summary, which would contradict it otherwise
  if (waits) {
    const { longest } = wait;
    const what = `${number(job.waiting)} waiting, up to ${duration(longest.for_s)}`;
    lines(cell, what, `${basename(longest.url)}: ${longest.reason}`);
  } else lines(cell, "reading", "");
  cell.title = wait?.longest.url ?? "";
  cell.firstElementChild.classList.toggle("waits", waits);
  cell.parentElement.classList.toggle("stalled", wait !== undefined && isStalled(wait));
}

function fillWaited(cell, { job }) {
  const causes = Object.entries(job.waited).filter(([, seconds]) => seconds >= 0.05);
  const most = causes.sort(([, a], [, b]) => b - a)[0];
  lines(cell, duration(job.waited_s), most ? `mostly ${most[0].replace(/_s$/, "")}` : "");
  cell.title = causes.map(([cause, seconds]) => `${cause.replace(/_s$/, "")}: ${duration(seconds)}`).join(", ");
}

function fillLane(cell, { job, lane }) {
  if (!cell.firstChild) {
    cell.append(make("canvas", { "aria-hidden": "true" }), make("span", { class: "visually-hidden" }));
  }
  const [canvas, text] = cell.children;
  if (lane === undefined) { setText(text, "not computed yet"); return; }
  const { cached, fetching, failed } = lane.counts;
  const counts = { cached, fetching, missing: lane.counts.missing.map((value, at) => value + failed[at]) };
  const words = PRESENCES.map(([name, word]) => `${number(sum(counts[name]))} ${word}`).join(", ");
  setText(text, `needed: ${words}`);
  const next = lane.soonest.map((use) => `${duration(use.in_s)}: ${basename(use.url)} (${use.presence})`).join("\n");
  const guess = job.shards_per_s ? "" : "\nthe pace is an estimate until a shard has been read";
  cell.title = `needed in the next ${duration(lane.looked_s)}: ${words}${guess}\n\n${next}`;
  draw(canvas, counts, lane.looked_s);
}

/** Bars as high as the number of shards needed, coloured by state; below, a mark if one is missing or being fetched. */
function draw(canvas, counts, looked) {
  const area = brush(canvas);
  if (area === null) return;
  const { context, width, height } = area, bins = counts.cached.length, step = width / bins, room = height - MARK - 2;
  const totals = counts.cached.map((cached, at) => cached + counts.fetching[at] + counts.missing[at]);
  const most = Math.max(1, ...totals);
  context.fillStyle = colour("--track");
  context.fillRect(0, room, width * Math.min(1, looked / HORIZON_S), 1);
  const tones = Object.fromEntries(PRESENCES.map(([name]) => [name, colour(`--${name}`)]));
  totals.forEach((total, at) => {
    let top = room;
    for (const [name] of PRESENCES) {
      const tall = total ? Math.max(counts[name][at] ? 2 : 0, (counts[name][at] / most) * (room - 2)) : 0;
      top -= tall;
      context.fillStyle = tones[name];
      context.fillRect(at * step, top, Math.max(1, step - 1), tall);
    }
    const worst = counts.missing[at] ? "missing" : counts.fetching[at] ? "fetching" : null;
    if (worst === null) return;
    context.fillStyle = tones[worst];
    context.fillRect(at * step, height - MARK, Math.max(1, step - 1), worst === "missing" ? MARK : MARK / 2);
  });
}

function showPast(jobs) {
  const [summary, list] = byId("past").children;
  byId("past").hidden = jobs.length === 0;
  setText(summary, `${count(jobs.length, "ended job")}`);
  sync(list, jobs, jobKey, () => make("li"), (item, job) => {
    const read = `${number(job.shards_done)} of ${number(job.shards_planned)} shards`;
    setText(item, `${job.name} (${job.user}): read ${read}, waited ${duration(job.waited_s)}`);
  });
}

function legend() {
  sync(byId("lane-legend"), PRESENCES, ([name]) => name, ([name, word]) => {
    const swatch = make("span", { class: "swatch" });
    swatch.style.background = `var(--${name})`;
    return make("li", {}, swatch, word);
  }, () => {});
}
