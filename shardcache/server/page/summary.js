// The summary: whether any reader is waiting and for what, warnings, and the key figures.

import { byId, definitions, make, setText, sync } from "./dom.js";
import { byJob, isLong, isStalled, keyOf, nameUsers, user } from "./waiting.js";
import { basename, count, duration, neededIn, number, percent, size } from "./words.js";

const MAX_WAITS = 6;

export function showSummary(moment, rates) {
  nameUsers(moment.jobs);
  setText(byId("who"), `${moment.cache.dir} · version ${moment.version} · up ${duration(moment.uptime_s)}`);
  const warnings = warningsOf(moment), waiting = [...byJob(moment.waits).values()].filter(isLong);
  const held = waiting.reduce((total, { readers }) => total + readers, 0);
  setText(byId("verdict-text"), verdict(moment, waiting, held));
  const level = held ? "waiting" : warnings.length ? "warned" : "well";
  byId("verdict").className = waiting.some(isStalled) ? "stalled" : level;
  showWaits(waiting);
  sync(byId("warnings"), warnings, ([what]) => what, newWarning, fill);
  figures(moment, rates);
}

function verdict({ jobs }, waiting, held) {
  const readers = jobs.reduce((total, job) => total + job.sessions, 0);
  if (readers === 0) return "No job is connected.";
  const of = count(jobs.filter((job) => job.sessions).length, "job");
  if (held === 0) return `No reader is waiting (${count(readers, "reader")}, ${of}).`;
  const reasons = [...new Set(waiting.map(({ longest }) => longest.reason.split(":")[0]))].join("; ");
  return `${number(held)} of ${count(readers, "reader")} ${held === 1 ? "is" : "are"} waiting: ${reasons}.`;
}

/** List the waiting jobs, for how long and for what; kept out of the line above, which is announced when it changes. */
function showWaits(waiting) {
  const shown = waiting.slice(0, MAX_WAITS), more = waiting.length - shown.length;
  sync(byId("waits"), shown, ({ job, uid }) => keyOf(job, uid), newWait, (item, { job, uid, readers, longest }) => {
    const what = `${basename(longest.url)}: ${longest.reason}`;
    fill(item, [job ?? "no job", count(readers, "reader"), `up to ${duration(longest.for_s)}`, what]);
    item.title = `${job}, ${user(uid)}\n${longest.url}`;
  });
  setText(byId("waits-more"), more ? `and ${count(more, "more job")}` : "");
}

const newWait = () => make("li", {}, make("b", { dir: "auto" }), make("span"), make("span"), make("span"));
const newWarning = () => make("li", {}, make("b"), " ", make("span"));
const fill = (item, texts) => texts.forEach((text, index) => setText(item.children[index], text));

function figures({ jobs, cache, counters, pins }, rates) {
  const ahead = jobs.filter((job) => job.sessions && job.ahead_s !== null).map((job) => job.ahead_s);
  const leases = counters.hits + counters.misses;
  const contents = [`${size(cache.used_bytes)} of ${size(cache.capacity_bytes)}`, count(cache.shards, "shard")];
  if (pins?.shards) contents.push(`${size(pins.size_bytes)} pinned`);
  definitions(byId("figures"), [
    ahead.length
      ? ["First missing shard needed in", neededIn(Math.min(...ahead)), "of all jobs"]
      : ["First missing shard needed in", "–", "all planned shards are cached"],
    ["Download rate", `${size(rates.now)}/s`, `${size(counters.origin_bytes + (counters.tier_bytes ?? 0))} since the start`],
    ["Cache hits", leases ? percent(counters.hits, leases) : "–", `of ${count(leases, "lease")}`],
    ["Cache", `${percent(cache.used_bytes, cache.capacity_bytes)} full`, contents.join(" · ")],
  ]);
}

// Warnings: conditions that need attention.

const LATE_S = 1;
const PINNED_FULL = 0.95;

/** Warnings as pairs [problem, what to do]. */
const warningsOf = (moment) => CHECKS.map((check) => check(moment)).filter((found) => found !== null);

const CHECKS = [
  ({ draining }) => (draining ? ["The daemon is stopping.", "Readers wait for the next daemon, then continue."] : null),
  ({ disk }) => (disk.error ? [`${disk.error.message}, for ${duration(disk.since_s)}.`, disk.error.remedy] : null),
  ({ cache, disk }) => (disk.short_bytes && !disk.error
    ? [
      `Other files on the disk limit the cache to ${size(cache.capacity_bytes - disk.short_bytes)}.`,
      "Remove them, lower --min-free, or lower --capacity.",
    ] : null),
  ({ tiers }) => (tiers?.some((tier) => tier.failing)
    ? [
      "The tier fails, so parts come from the origins.",
      `It is tried again every 10 s; shardcache doctor says what is wrong with ${tiers.map((tier) => tier.address).join(", ")}.`,
    ] : null),
  ({ pins }) => (pins?.shards && pins.size_bytes > PINNED_FULL * pins.limit_bytes
    ? [
      "The limit on pinned shards is almost reached.",
      `${size(pins.size_bytes)} of ${size(pins.limit_bytes)} are pinned; shardcache unpin frees some.`,
    ] : null),
  ({ counters }) => (counters.corrupt
    ? [
      `${count(counters.corrupt, "corrupt shard")} since the start.`,
      "Each was quarantined and is re-fetched when it is needed; the log names them.",
    ] : null),
  ({ loop_lag: lag }) => (lag.p99_s > LATE_S
    ? [`The daemon responds slowly: ${duration(lag.p99_s)}.`, "The node has no CPU time to spare for it."] : null),
  ({ cache }) => (cache.free_bytes === null ? ["The cache folder is missing.", cache.dir] : null),
];
