// What somebody should look into.

import { count, duration, size } from "./words.js";

const LATE_S = 1;
const PINNED_FULL = 0.95;

/** Warnings as pairs of what it is and what to do. */
export const warningsOf = (moment) => CHECKS.map((check) => check(moment)).filter((found) => found !== null);

const CHECKS = [
  ({ draining }) => (draining ? ["The daemon stops.", "Readers wait for the next one, and go on."] : null),
  ({ disk }) => (disk.error ? [`${disk.error.message}, for ${duration(disk.since_s)}.`, disk.error.remedy] : null),
  ({ disk }) => (disk.short_bytes && !disk.error
    ? [
      "The disk is full of other things.",
      `${size(disk.short_bytes)} less than --min-free are free, and nothing in the cache can go.`,
    ] : null),
  ({ pins }) => (pins?.shards && pins.size_bytes > PINNED_FULL * pins.limit_bytes
    ? [
      "Little more can be pinned.",
      `${size(pins.size_bytes)} of ${size(pins.limit_bytes)} are; shardcache unpin lets shards go again.`,
    ] : null),
  ({ counters }) => (counters.corrupt
    ? [
      `${count(counters.corrupt, "corrupt shard")} since the start.`,
      "Each was set aside and is fetched again when it is needed; the log names them.",
    ] : null),
  ({ loop_lag: lag }) => (lag.p99_s > LATE_S
    ? [`The daemon answers late: ${duration(lag.p99_s)}.`, "The node has no processor to spare for it."] : null),
  ({ cache }) => (cache.free_bytes === null ? ["The cache's folder is gone.", cache.dir] : null),
];
