// Waiting readers, grouped by job.

// Waits shorter than SHORT_S are most likely over by now; from STALLED_S on, a reader counts as stalled.
const SHORT_S = 1;
const STALLED_S = 10;

const users = new Map();

/** Remember the names of the users who have jobs. */
export const nameUsers = (jobs) => jobs.forEach((job) => users.set(job.uid, job.user));
export const user = (uid) => users.get(uid) ?? uid;
export const keyOf = (name, uid) => JSON.stringify([name, uid]);
export const isLong = ({ longest }) => longest.for_s >= SHORT_S;
export const isStalled = ({ longest }) => longest.for_s >= STALLED_S;

/** Waits by job, as { job, uid, readers, longest }; the job that waits longest first. */
export function byJob(waits) {
  const found = new Map();
  for (const wait of [...waits].sort((a, b) => b.for_s - a.for_s)) {
    const key = keyOf(wait.job, wait.uid), previous = found.get(key);
    if (previous) previous.readers += wait.readers;
    else found.set(key, { job: wait.job, uid: wait.uid, readers: wait.readers, longest: wait });
  }
  return found;
}
