// The summary: whether any reader is waiting and for what, warnings, and the key figures.

import { byId, definitions, make, say, sync } from "./dom.js";
import { warningsOf } from "./warnings.js";
import { byJob, isLong, isStalled, keyOf, nameUsers, user } from "./waiting.js";
import { basename, count, duration, neededIn, number, percent, size } from "./words.js";

const MOST_WAITS = 6;

export function showSummary(moment, rates) {
  nameUsers(moment.jobs);
  say(byId("who"), `${moment.cache.dir} · version ${moment.version} · up ${duration(moment.uptime_s)}`);
  const warnings = warningsOf(moment), waiting = [...byJob(moment.waits).values()].filter(isLong);
  const held = waiting.reduce((total, { readers }) => total + readers, 0);
  say(byId("verdict-text"), verdict(moment, waiting, held));
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
  const shown = waiting.slice(0, MOST_WAITS), more = waiting.length - shown.length;
  sync(byId("waits"), shown, ({ job, uid }) => keyOf(job, uid), newWait, (item, { job, uid, readers, longest }) => {
    const what = `${basename(longest.url)}: ${longest.reason}`;
    fill(item, [job ?? "no job", count(readers, "reader"), `up to ${duration(longest.for_s)}`, what]);
    item.title = `${job}, ${user(uid)}\n${longest.url}`;
  });
  say(byId("waits-more"), more ? `and ${count(more, "more job")}` : "");
}

const newWait = () => make("li", {}, make("b", { dir: "auto" }), make("span"), make("span"), make("span"));
const newWarning = () => make("li", {}, make("b"), " ", make("span"));
const fill = (item, texts) => texts.forEach((text, index) => say(item.children[index], text));

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
