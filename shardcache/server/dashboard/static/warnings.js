// Warnings: conditions that need attention.

import { count, duration, size } from "./words.js";

const LATE_S = 1;
const PINNED_FULL = 0.95;

/** Warnings as pairs [problem, what to do]. */
export const warningsOf = (moment) => CHECKS.map((check) => check(moment)).filter((found) => found !== null);

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
