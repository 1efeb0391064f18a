// The jobs that are short of data, by their present waits and by the share of the last 30 s that
// they waited.

import { count } from "./dom.js";

// Waits shorter than SHORT_S are most likely over by now; from STALLED_S on, a reader is stalled.
const SHORT_S = 1;
const STALLED_S = 10;
// A job that is short of data may wait for a moment each time, and be reading when one looks.
const SHORT_SHARE = 0.1;
const STALLED_SHARE = 0.5;

export const keyOf = ({ job, name = job, uid }) => JSON.stringify([name, uid]);

/** Waits by job, as { job, uid, readers, longest }; the job that waits longest first. */
function byJob(waits) {
  const found = new Map();
  for (const wait of [...waits].sort((a, b) => b.for_s - a.for_s)) {
    const previous = found.get(keyOf(wait));
    if (previous) {
      previous.readers += wait.readers;
    } else {
      found.set(keyOf(wait), { ...wait, longest: wait });
    }
  }
  return found;
}

/**
 * The jobs that are short of data, by key, the worst first: { job, uid, readers, share, longest,
 * reason, stalled }. `share` is of the last 30 s; `longest` is the longest present wait, or null if
 * it is over in a moment. `reasons` keeps each job's latest, for moments in which none of its
 * readers waits.
 */
export function shortOfData({ jobs, waits }, reasons) {
  const now = byJob(waits);
  for (const [key, { longest }] of now) reasons.set(key, longest.reason);
  const known = new Map(jobs.map((job) => [keyOf(job), job]));
  const found = [];
  for (const key of new Set([...now.keys(), ...known.keys()])) {
    const wait = now.get(key);
    const job = known.get(key);
    const share = job?.sessions ? job.waiting_share : 0;
    const longest = wait && wait.longest.for_s >= SHORT_S ? wait.longest : null;
    if (longest === null && share < SHORT_SHARE) continue;
    const stalled = share >= STALLED_SHARE || (longest !== null && longest.for_s >= STALLED_S);
    const who = wait ? { job: wait.job, uid: wait.uid } : { job: job.name, uid: job.uid };
    const readers = longest ? wait.readers : job.sessions;
    const reason = reasons.get(key) ?? "";
    found.push([key, { ...who, readers, share, longest, reason, stalled }]);
  }
  const held = ({ longest, share }) => Math.max(longest?.for_s ?? 0, 30 * share);
  return new Map(found.sort(([, a], [, b]) => held(b) - held(a)));
}

/** Whether a job has been short of data for more than a moment. */
export const isLasting = ({ share }) => share >= SHORT_SHARE;

/**
 * The summary of a moment in one sentence. It is announced whenever it changes, so it has no figure
 * that always does.
 */
export function verdict(jobs, short) {
  const readers = jobs.reduce((total, job) => total + job.sessions, 0);
  if (readers === 0) return "No job is connected.";
  const held = [...short.values()];
  const live = jobs.filter((job) => job.sessions).length;
  const of = `${count(readers, "reader")}, ${count(live, "job")}`;
  if (held.length === 0) return `No reader is waiting (${of}).`;
  const reasons = new Set(held.map(({ reason }) => reason.split(": ")[0]).filter(Boolean));
  const what = reasons.size ? `: ${[...reasons].join("; ")}` : "";
  const be = (number) => (number === 1 ? "is" : "are");
  if (held.some(isLasting)) {
    return `${held.length} of ${count(live, "job")} ${be(held.length)} short of data${what}.`;
  }
  const waiting = held.reduce((total, job) => total + job.readers, 0);
  return `${waiting} of ${count(readers, "reader")} ${be(waiting)} waiting${what}.`;
}

/** The colour of the summary: "stalled", "waiting", "warned" or "well". */
export function level(short, warnings) {
  if ([...short.values()].some(({ stalled }) => stalled)) return "stalled";
  if (short.size) return "waiting";
  return warnings.length ? "warned" : "well";
}
