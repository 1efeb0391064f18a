"""Tables of metrics: the numbers of the status page that `/metrics` shows.

`prometheus` turns each table into metrics. A table belongs to one section of the status page, such
as the cache or the pins. Each row names a number of that section, its metric and its HELP line.

- A transfer is everything that is done to get a shard into the cache.
- A lease is the promise to a reader that a shard stays on disk while it is read; a pin is the same
  promise to a user, without an end.
- The bill is what was fetched and read, and its price.
- The scrubber reads cached shards again, in rounds, to find damage.
- The tier is a cache that the nodes of a cluster share in front of the origins.
"""

from typing import NamedTuple, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

MetricKind: TypeAlias = type[GaugeMetricFamily | CounterMetricFamily]

GAUGE = GaugeMetricFamily
COUNTER = CounterMetricFamily


class Row(NamedTuple):
    """One number of the status page and its metric.

    Attributes:
        kind: `GAUGE` or `COUNTER`.
        key: the number's key in its section of the status page.
        name: the metric's name, without the prefix `shardcache_` and a counter's suffix `_total`.
        help: the metric's HELP line.
    """

    kind: MetricKind
    key: str
    name: str
    help: str


DAEMON = (
    Row(GAUGE, "draining", "draining", "1 while the daemon is shutting down."),
    Row(GAUGE, "tasks", "asyncio_tasks", "Tasks on the daemon's event loop."),
    Row(GAUGE, "threads", "threads", "Threads of the daemon."),
)
CACHE = (
    Row(GAUGE, "capacity_bytes", "cache_capacity_bytes", "Maximum size of the cache."),
    Row(
        GAUGE,
        "used_bytes",
        "cache_used_bytes",
        "Space used by the cache, including space reserved for transfers.",
    ),
    Row(
        GAUGE,
        "reserved_bytes",
        "cache_reserved_bytes",
        "Space reserved for transfers, part of the used space.",
    ),
    Row(
        GAUGE,
        "leased_bytes",
        "cache_leased_bytes",
        "Size of the leased shards, which cannot be evicted.",
    ),
    Row(GAUGE, "free_bytes", "cache_disk_free_bytes", "Free space of the cache's filesystem."),
    Row(GAUGE, "shards", "cache_shards", "Published shards."),
    Row(
        GAUGE,
        "leases",
        "cache_leases",
        "Leases held by readers; a shard leased by two readers counts twice.",
    ),
)
COUNTERS = (
    Row(COUNTER, "hits", "hits", "Leases and reads that were served from the cache."),
    Row(COUNTER, "misses", "misses", "Leases that had to wait for a transfer."),
    Row(
        COUNTER,
        "evictions",
        "evictions",
        "Published shards evicted, to free space or by command.",
    ),
    Row(
        COUNTER,
        "refetches",
        "refetches",
        "Shards re-fetched after having been evicted to free space.",
    ),
    Row(
        COUNTER,
        "corrupt",
        "corrupt_shards",
        "Shards found corrupt: on arrival, by a reader, by verify, or by the scrubber.",
    ),
    Row(
        COUNTER,
        "refused",
        "refused_shards",
        "Shards refused on arrival: cut short, with torn samples, or no tar.",
    ),
    Row(
        COUNTER,
        "origin_bytes",
        "origin_received_bytes",
        "Bytes received from origins, failed attempts included.",
    ),
    Row(COUNTER, "s3_requests", "s3_requests", "Requests of S3 clients, refused ones included."),
    Row(COUNTER, "s3_bytes", "s3_sent_bytes", "Bytes of objects sent to S3 clients."),
    Row(COUNTER, "origin_requests", "origin_requests", "Requests sent to origins."),
    Row(
        COUNTER,
        "hit_bytes",
        "hit_bytes",
        "Size of the shards of leases granted from published shards.",
    ),
    Row(
        COUNTER,
        "tier_bytes",
        "tier_received_bytes",
        "Bytes received from the tier, failed requests included.",
    ),
    Row(COUNTER, "tier_requests", "tier_requests", "Requests sent to the tier."),
    Row(
        COUNTER,
        "tier_failures",
        "tier_failures",
        "Requests to the tier that failed; the origin was requested.",
    ),
    Row(
        COUNTER,
        "past_tier_bytes",
        "tier_bypassed_bytes",
        "Bytes received from origins that have a tier in front.",
    ),
    Row(COUNTER, "retries", "origin_retries", "Requests retried after a transient failure."),
    Row(
        COUNTER,
        "hedges",
        "hedges",
        "Hedged requests: parts requested a second time because the first was late.",
    ),
    Row(
        COUNTER,
        "hedged_bytes",
        "hedged_bytes",
        "Bytes received by the losing request of a hedged pair.",
    ),
    Row(
        COUNTER,
        "paused",
        "paused_parts",
        "Parts paused to give their connection to a more urgent one.",
    ),
)
BILL = (
    Row(COUNTER, "read_bytes", "read_bytes", "Size of the shards that readers have read."),
    Row(COUNTER, "read_requests", "reads", "Shards that readers have read and released."),
    Row(
        COUNTER,
        "read_cost",
        "read_cost",
        "Price of reading these shards by a request each, if prices are set.",
    ),
    Row(
        COUNTER,
        "fetched_cost",
        "fetched_cost",
        "Price of what was fetched from origins, if prices are set.",
    ),
)
DISK = (
    Row(
        GAUGE,
        "healthy",
        "disk_healthy",
        "1 if the cache disk is healthy; while 0, nothing new is fetched.",
    ),
    Row(
        GAUGE,
        "silent_s",
        "disk_silent_seconds",
        "Time for which the disk has not responded; 0 if it responds.",
    ),
    Row(
        GAUGE,
        "short_bytes",
        "disk_short_bytes",
        "Part of the capacity that other files on the disk take.",
    ),
)
PINS = (
    Row(GAUGE, "shards", "pinned_shards", "Pinned shards."),
    Row(GAUGE, "missing", "pinned_missing_shards", "Pinned shards that are not cached."),
    Row(
        GAUGE,
        "size_bytes",
        "pinned_bytes",
        "Total size of the pinned shards, missing ones included.",
    ),
    Row(GAUGE, "limit_bytes", "pinned_limit_bytes", "Maximum total size of the pinned shards."),
)
SCRUB = (
    Row(
        COUNTER,
        "scrubbed_bytes",
        "scrubbed_bytes",
        "Bytes of cached shards read by the scrubber.",
    ),
    Row(
        COUNTER,
        "scrubbed_shards",
        "scrubbed_shards",
        "Cached shards that the scrubber found intact.",
    ),
    Row(
        COUNTER,
        "corrupt",
        "scrub_corrupt_shards",
        "Cached shards that the scrubber found corrupt.",
    ),
    Row(
        GAUGE,
        "round_share",
        "scrub_round_ratio",
        "Completed fraction of the current scrub round.",
    ),
    Row(
        GAUGE,
        "last_round_ended_at_s",
        "scrub_last_round_timestamp_seconds",
        "End of the last complete scrub round.",
    ),
)
ORIGIN = (
    Row(GAUGE, "connections", "origin_connections", "Part requests in progress."),
    Row(
        GAUGE,
        "limit",
        "origin_connections_limit",
        "Current limit on concurrent requests, adapted to the origin.",
    ),
    Row(COUNTER, "throttled", "origin_throttled", "Requests that the origin throttled (503, 429)."),
)
TIER = (
    Row(
        GAUGE,
        "failing",
        "tier_failing",
        "1 while the tier is requested only by probes, after failures.",
    ),
    Row(
        GAUGE,
        "stale",
        "tier_stale",
        "1 while this node's nginx uses an old list of nodes or old certificates.",
    ),
    Row(
        GAUGE,
        "certificate_expires_s",
        "tier_certificate_expiry_timestamp_seconds",
        "When this node's certificates for the tier expire; +Inf if it has none.",
    ),
    Row(
        GAUGE,
        "owners_left_out",
        "tier_left_out_owners",
        "Nodes whose part of the tier is left out for being slow.",
    ),
    Row(
        COUNTER,
        "store_bytes",
        "tier_store_bytes",
        "Bytes that this node's nginx received from origins.",
    ),
    Row(
        GAUGE,
        "cached_bytes",
        "tier_cached_bytes",
        "Size of the parts that this node's nginx has cached.",
    ),
)
JOB = (
    Row(GAUGE, "sessions", "job_sessions", "Connected readers."),
    Row(GAUGE, "waiting", "job_waiting_sessions", "Readers that are waiting for data now."),
    Row(
        GAUGE,
        "ahead_s",
        "job_ahead_seconds",
        "Time until a reader needs a missing shard; +Inf if none is missing.",
    ),
    Row(
        COUNTER,
        "shards_planned",
        "job_planned_shards",
        "Shards in the epochs that readers have started.",
    ),
    Row(COUNTER, "shards_done", "job_done_shards", "Shards read and released."),
    Row(
        COUNTER,
        "samples_unmatched",
        "job_unmatched_samples",
        "Samples without one of their key in joined shards.",
    ),
)
