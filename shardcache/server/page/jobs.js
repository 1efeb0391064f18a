// The jobs: the current state of each, and its next five minutes as a strip; and the upcoming
// shards.

import { brush, byId, colour, setText, setTexts, sync, table } from "./dom.js";
import { count, duration, ending, neededIn, number, percent, size } from "./dom.js";
import { keyOf } from "./waits.js";

const HORIZON_S = 300;
const PRESENCES = [["cached", "cached"], ["fetching", "being fetched"], ["missing", "missing"]];
const MARK = 4;

/** The urls that the page names, to be told apart. */
export function urlsOf({ waits, gaps, transfers }) {
  return [...waits, ...gaps, ...transfers].map(({ url }) => url);
}

function read(job) {
  const shards = `${number(job.shards_done)} of ${number(job.shards_planned)}`;
  if (!job.samples_unmatched) return shards;
  return `${shards} (${number(job.samples_unmatched)} samples unmatched)`;
}

function pace(rate) {
  if (rate === 0) return "–";
  return rate < 10 ? rate.toPrecision(2) : number(Math.round(rate));
}

function ahead(job) {
  if (job.ahead_s !== null) return neededIn(job.ahead_s);
  return job.shards_planned ? "all cached" : "no plan yet";
}

export function showJobs(moment, short) {
  const { jobs, lanes } = moment;
  const urls = urlsOf(moment);
  const laneOf = new Map(lanes.map((lane) => [keyOf(lane), lane]));
  const live = jobs.filter((job) => job.sessions > 0);
  live.sort((a, b) => (b.waiting > 0) - (a.waiting > 0)); // jobs that wait come first
  table(byId("job-rows"), live, keyOf, (row, job, name, now, ...cells) => {
    setTexts(name, [job.name, job.user]);
    showNow(row, now, job, short.get(keyOf(job)), urls);
    const texts = [number(job.sessions), read(job), pace(job.shards_per_s), ahead(job)];
    texts.forEach((text, at) => setText(cells[at], text));
    showWaited(cells[4], job);
    showLane(cells[5], job, laneOf.get(keyOf(job)));
  }, "No job is connected.");
  const past = jobs.filter((job) => job.sessions === 0);
  byId("past").hidden = past.length === 0;
  setText(byId("past-count"), count(past.length, "ended job"));
  sync(byId("past-jobs"), past, keyOf, (item, job) => {
    const facts = `shards read ${read(job)}, waited ${duration(job.waited_s)}, ${job.bill.text}`;
    setText(item, `${job.name} (${job.user}): ${facts}`);
  });
}

/** Show what a job is doing; `held` says why it is short of data, or is undefined if it is not. */
function showNow(row, cell, job, held, urls) {
  setTexts(cell, held === undefined ? ["reading", ""] : [waiting(job, held), whatFor(held, urls)]);
  cell.title = held?.longest?.url ?? "";
  cell.firstElementChild.classList.toggle("waits", held !== undefined);
  row.classList.toggle("stalled", held !== undefined && held.stalled);
}

function waiting(job, { share, longest }) {
  if (longest) return `${number(job.waiting)} waiting, up to ${duration(longest.for_s)}`;
  return `waits ${percent(share, 1)} of the time`;
}

/** What a job that is short of data waits for. */
export const whatFor = ({ longest, reason }, urls) => (
  longest ? `${ending(longest.url, urls)}: ${longest.reason}` : reason
);

function showWaited(cell, job) {
  const causes = Object.entries(job.waited)
    .filter(([, seconds]) => seconds >= 0.05)
    .sort(([, a], [, b]) => b - a)
    .map(([name, seconds]) => [name.replace(/_s$/, ""), duration(seconds)]);
  setTexts(cell, [duration(job.waited_s), causes.length ? `mostly ${causes[0][0]}` : ""]);
  cell.title = causes.map((cause) => cause.join(": ")).join(", ");
}

function showLane(cell, job, lane) {
  const [canvas, text] = cell.children;
  if (lane === undefined) {
    setText(text, "not computed yet");
    return;
  }
  const { cached, fetching, failed } = lane.counts;
  const missing = lane.counts.missing.map((value, at) => value + failed[at]);
  const counts = { cached, fetching, missing };
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const words = PRESENCES.map(([name, word]) => `${number(sum(counts[name]))} ${word}`).join(", ");
  setText(text, `needed: ${words}`);
  const next = lane.soonest
    .map((use) => `${duration(use.in_s)}: ${ending(use.url)} (${use.presence})`)
    .join("\n");
  const guess = job.shards_per_s ? "" : "\nthe pace is an estimate until a shard has been read";
  cell.title = `needed in the next ${duration(lane.known_to_s)}: ${words}${guess}\n\n${next}`;
  drawLane(canvas, counts, lane.known_to_s);
}

/**
 * Bars as high as the number of shards needed, coloured by state; below, a mark if one is missing
 * or being fetched.
 */
function drawLane(canvas, counts, knownToS) {
  const area = brush(canvas);
  if (area === null) return;
  const { context, width, height } = area;
  const { cached, fetching, missing } = counts;
  const step = width / cached.length;
  const room = height - MARK - 2;
  const totals = cached.map((value, at) => value + fetching[at] + missing[at]);
  const most = Math.max(1, ...totals);
  const bar = (tone, ...box) => {
    context.fillStyle = tone;
    context.fillRect(...box);
  };
  bar(colour("--track"), 0, room, width * Math.min(1, knownToS / HORIZON_S), 1);
  const tones = Object.fromEntries(PRESENCES.map(([name]) => [name, colour(`--${name}`)]));
  totals.forEach((_, at) => {
    const left = at * step;
    const wide = Math.max(1, step - 1);
    let top = room;
    for (const [name] of PRESENCES) {
      const needed = counts[name][at];
      if (needed === 0) continue;
      const tall = Math.max(2, (needed / most) * (room - 2));
      top -= tall;
      bar(tones[name], left, top, wide, tall);
    }
    if (missing[at]) {
      bar(tones.missing, left, height - MARK, wide, MARK);
    } else if (fetching[at]) {
      bar(tones.fetching, left, height - MARK, wide, MARK / 2);
    }
  });
}

// Upcoming shards: the missing shards that are needed soonest, then all other transfers.

const MAX_ROWS = 14;
const DOWNLOADING = "downloading from the object store";
const FAILED = "failed; retried when a reader needs it";
const STATES = { fetching: "being fetched", missing: "to be fetched", failed: FAILED };

const isWaitedFor = ({ transfer }) => transfer?.class === "waiting";
const urgency = (row) => (isWaitedFor(row) ? -1 : row.in_s ?? Infinity);

export function showUpcoming(moment) {
  const { jobs, gaps, transfers, lanes } = moment;
  const urls = urlsOf(moment);
  const rows = upcoming(gaps, transfers);
  const users = new Map(jobs.map(({ uid, user }) => [uid, user]));
  const key = ({ url, job }) => `${url} ${job}`;
  table(byId("upcoming-rows"), rows.slice(0, MAX_ROWS), key, (_, row, need, shard, job, state) => {
    setText(need, isWaitedFor(row) ? "waiting" : neededIn(row.in_s));
    need.classList.toggle("waits", isWaitedFor(row));
    setText(shard, ending(row.url, urls), row.url);
    setText(job, row.job ? `${row.job} (${users.get(row.uid) ?? row.uid})` : "");
    showState(state, row);
  }, nothingUpcoming(lanes));
  const more = rows.length - MAX_ROWS;
  setText(byId("upcoming-more"), more > 0 ? `and ${more} more` : "");
}

/** What the list says while it is empty. */
function nothingUpcoming(lanes) {
  if (!lanes.length) return "No job is reading.";
  const isNeeded = lanes.some(({ counts }) => Object.values(counts).flat().some(Boolean));
  if (!isNeeded) return "No shard is needed in the next five minutes.";
  return "All shards needed in the next five minutes are cached.";
}

/**
 * A row for each gap, with its transfer if there is one, and for each other transfer; the most
 * urgent first.
 */
function upcoming(gaps, transfers) {
  const left = new Set(transfers); // redacted urls are all equal: each transfer is used once
  const rows = gaps.map((gap) => {
    const transfer = transfers.find((each) => each.url === gap.url && left.has(each)) ?? null;
    left.delete(transfer);
    return { ...gap, transfer };
  });
  for (const transfer of left) {
    rows.push({ in_s: transfer.needed_in_s, url: transfer.url, transfer });
  }
  return rows.sort((a, b) => urgency(a) - urgency(b) || 0); // NaN if neither is planned
}

function showState(cell, { presence, transfer }) {
  const [bar, text] = cell.children;
  bar.hidden = transfer === null;
  cell.className = transfer === null ? `state is-${presence}` : "state";
  setText(text, transfer === null ? STATES[presence] : progress(bar, transfer));
  cell.title = text.textContent;
}

/** Show a transfer's progress in a bar; return it in words. */
function progress(bar, transfer) {
  const { done_bytes: done, total_bytes: total, rate_bytes_per_s: rate } = transfer;
  const { stage, last_error: error } = transfer;
  if (total) {
    bar.max = total;
    bar.value = done;
  } else {
    bar.removeAttribute("value");
  }
  const now = error || (stage !== DOWNLOADING ? stage : rate && `${size(rate)}/s`);
  return [total && `${size(done)} of ${size(total)}`, now].filter(Boolean).join(" · ");
}
