// The summary: whether any reader is waiting and for what, warnings, and the key figures; and the
// traffic: the download rate, and the origins with their connections and counters.

import { byId, setText, setTexts, sync, table } from "./dom.js";
import { count, duration, neededIn, number, percent, size } from "./dom.js";
import { urlsOf, whatFor } from "./jobs.js";
import { isLasting, keyOf, level, verdict } from "./waits.js";

const MAX_WAITS = 6;

export function showSummary(moment, rates, short) {
  const { jobs, cache, version, uptime_s: up } = moment;
  setText(byId("who"), `${cache.dir} · version ${version} · up ${duration(up)}`);
  const warnings = CHECKS.map((check) => check(moment)).filter(Boolean);
  setText(byId("verdict-text"), verdict(jobs, short));
  byId("verdict").className = level(short, warnings);
  showWaits([...short.values()], new Map(jobs.map(({ uid, user }) => [uid, user])), urlsOf(moment));
  sync(byId("warnings"), warnings, ([what]) => what, setTexts);
  sync(byId("figures"), figures(moment, rates), ([name]) => name, setTexts);
}

/**
 * List the jobs that are short of data, and of what; kept out of the line above, which is
 * announced.
 */
function showWaits(held, users, urls) {
  sync(byId("waits"), held.slice(0, MAX_WAITS), keyOf, (item, each) => {
    const { job, uid, readers, share, longest } = each;
    const who = job ? `${job} (${users.get(uid) ?? uid})` : "no job";
    const long = isLasting(each)
      ? `waiting ${percent(share, 1)} of the last 30 s`
      : `up to ${duration(longest.for_s)}`;
    setTexts(item, [who, count(readers, "reader"), long, whatFor(each, urls)]);
    item.title = longest?.url ?? "";
  });
  const more = held.length - MAX_WAITS;
  setText(byId("waits-more"), more > 0 ? `and ${count(more, "more job")}` : "");
}

/** In how many seconds the first missing shard is needed, as [value, more]. */
function firstMissing(jobs) {
  const live = jobs.filter((job) => job.sessions);
  const ahead = live.map((job) => job.ahead_s).filter((seconds) => seconds !== null);
  if (ahead.length) return [neededIn(Math.min(...ahead)), "of all jobs"];
  const isPlanned = live.some((job) => job.shards_planned);
  return ["–", isPlanned ? "all planned shards are cached" : "no shard is planned"];
}

/** The key figures, as [name, value, more]. */
export function figures({ jobs, cache, counters, pins, bill }, rates) {
  const leases = counters.hits + counters.misses;
  const used = `${size(cache.used_bytes)} of ${size(cache.capacity_bytes)}`;
  const contents = [used, count(cache.shards, "shard")];
  if (pins.shards) contents.push(`${size(pins.size_bytes)} pinned`);
  return [
    ["First missing shard needed in", ...firstMissing(jobs)],
    ["Download rate", `${size(rates.now)}/s`, `${size(downloaded(counters))} since the start`],
    ["Saved", bill.saved_bytes > 0 ? size(bill.saved_bytes) : "–", bill.text],
    ["Cache hits", leases ? percent(counters.hits, leases) : "–", `of ${count(leases, "lease")}`],
    ["Cache", `${percent(cache.used_bytes, cache.capacity_bytes)} full`, contents.join(" · ")],
  ];
}

// Warnings: conditions that need attention, as pairs [problem, what to do].

const LATE_S = 1;
const PINNED_FULL = 0.95;

const CHECKS = [
  ({ draining }) => draining && [
    "The daemon is stopping.",
    "Readers wait for the next daemon, then continue.",
  ],
  ({ disk }) => disk.error && [
    `${disk.error.message}, for ${duration(disk.since_s)}.`,
    disk.error.remedy,
  ],
  ({ cache, disk }) => disk.short_bytes && !disk.error && [
    `Other files on the disk limit the cache to ${size(cache.capacity_bytes - disk.short_bytes)}.`,
    "Remove them, lower --min-free, or lower --capacity.",
  ],
  ({ tiers }) => tiers.some((tier) => tier.failing) && [
    "The tier is failing; parts come from the origins.",
    "It is retried every 10 s; shardcache doctor says what is wrong with "
      + `${tiers.map((tier) => tier.address).join(", ")}.`,
  ],
  ({ pins }) => pins.shards && pins.size_bytes > PINNED_FULL * pins.limit_bytes && [
    "The limit on pinned shards is almost reached.",
    `${size(pins.size_bytes)} of ${size(pins.limit_bytes)} are pinned; `
      + "shardcache unpin frees some.",
  ],
  ({ counters }) => counters.corrupt && [
    `${count(counters.corrupt, "corrupt shard")} since the start.`,
    "Each was quarantined and is re-fetched when it is needed; the log names them.",
  ],
  ({ loop_lag: lag }) => lag.p99_s > LATE_S && [
    `The daemon responds slowly: ${duration(lag.p99_s)}.`,
    "The node has no CPU time to spare for it.",
  ],
  ({ cache }) => cache.free_bytes === null && ["The cache folder is missing.", cache.dir],
];

// The traffic

const KEPT = 120;

const downloaded = (counters) => counters.origin_bytes + counters.tier_bytes;

/**
 * The download rate, from the origins and the tier, over the last two minutes, in bytes per second.
 */
export class Rates {
  values = [];
  previous = null;

  /** The latest rate. */
  get now() { return this.values.at(-1) ?? 0; }

  /** Add a moment's counter; after a restart of the daemon, start over. */
  take({ uptime_s: at, counters }) {
    const previous = this.previous;
    const bytes = downloaded(counters);
    this.previous = { at, bytes };
    if (previous === null || previous.at === at) return;
    if (previous.at > at) {
      this.values = [];
      return;
    }
    this.values.push(Math.max(0, (bytes - previous.bytes) / (at - previous.at)));
    this.values.splice(0, this.values.length - KEPT);
    this.draw();
  }

  draw() {
    const most = Math.max(0, ...this.values);
    const top = ceiling(most);
    const first = KEPT - this.values.length;
    const line = this.values.map((value, index) => `${first + index},${1 - value / top}`).join(" ");
    byId("rate-line").setAttribute("points", line);
    byId("rate-area").setAttribute("points", `${first},1 ${line} ${KEPT - 1},1`);
    setText(byId("rate-top"), `${size(top)}/s`);
    const peak = `peak ${size(most)}/s in the last ${this.values.length} s`;
    setText(byId("rate-text"), `now ${size(this.now)}/s, ${peak}`);
  }
}

/** The next 1, 2 or 5 times a power of ten, so that the axis rarely changes. */
function ceiling(value) {
  if (value < 1000) return 1000;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((step) => step * power >= value);
}

export function showStores({ origins, tiers, counters, limits }) {
  const holdingFirst = [...limits].sort((a, b) => b.holds - a.holds);
  sync(byId("limits"), holdingFirst, (limit) => limit.text, (item, { text, holds }) => {
    setText(item.firstElementChild, text);
    item.firstElementChild.classList.toggle("waits", holds);
  });
  table(byId("store-rows"), origins, (row) => row.name, (_, row, name, ...cells) => {
    setText(name, row.name, row.name);
    const numbers = [row.connections, row.limit, row.throttled];
    numbers.forEach((value, at) => setText(cells[at], number(value)));
  }, "No requests yet.");
  for (const entry of byId("counters").children) {
    const { counter } = entry.dataset;
    const inWords = counter.endsWith("_bytes") ? size : number;
    setText(entry.lastElementChild, inWords(counters[counter]));
  }
  byId("from-tier").hidden = tiers.length === 0;
}
