"""Several jobs on one node: how often a dataset crosses the network, if all or half of it fits.

With half of it, the cache has room for half the dataset and for the shard that each reader holds in
its hands. Offline MIN (Belady, A study of replacement algorithms for a virtual-storage computer,
IBM Systems Journal 5(2), 1966) gets all of that room and the very sequence of reads that happened:
the order in which the workers of both jobs came to the first sample of each shard. It may evict
what a reader still holds, which no real cache may.

Shards are shuffled, but their samples not mixed. Thus a read is one event, and a reader holds one
shard. With a window it would hold many, each from its first sample to its last, none of which MIN
could evict: the figure would tell how wide the window is, and not how well the cache decides.
"""

from benchmarks.data import LARGE, Kind
from benchmarks.downloads.cold import SAMPLES_PER_S, WORKERS, Course, train
from benchmarks.measure import Row, Target, call_together, command
from benchmarks.workplace import Workplace
from shardcache.plan.replay import Read, furthest_next, misses

JOBS = 3
EPOCHS = 2
HALF_JOBS = 2
HALF_EPOCHS = 6
HALF_SHARDS = 100

_SHARD_BYTES = 10_000_000
_STAGGER_EPOCHS = 0.4  # the second job comes when the first is this far into its first epoch


def sharing(place: Workplace) -> list[Row]:
    """Return the bytes that the store sent to jobs with room for all, next to the dataset's."""
    url = place.url(LARGE)
    dataset = place.dataset(LARGE)
    with place.daemon() as daemon:
        jobs = [
            command(read, url=url, socket=str(daemon.socket), job=f"job-{number}")
            for number in range(JOBS)
        ]
        for seen in call_together(jobs):
            wanted = [EPOCHS * dataset.samples, dataset.samples]
            if seen != wanted:
                raise RuntimeError(
                    f"a job saw {seen} samples and distinct ones instead of {wanted}"
                )
        origin_bytes = daemon.get("/v1/status")["counters"]["origin_bytes"]
    place.say(f"{JOBS} jobs × {EPOCHS} epochs: {origin_bytes / 1e6:,.0f} MB from the store")
    what = f"from the store, {JOBS} jobs × {EPOCHS} epochs"
    return [
        Row(
            "MB", what, origin_bytes / 1e6, "the dataset", dataset.tar_bytes / 1e6, Target("=", 1.0)
        )
    ]


def read(url: str, socket: str, job: str) -> tuple[int, int]:
    """Read every epoch through a loader; return the numbers of samples and of distinct ones."""
    from torch.utils.data import DataLoader

    from shardcache_client.dataset import ShardDataset

    dataset = ShardDataset(url, shuffle=True, seed=7, job=job, socket=socket)
    loader = DataLoader(dataset, batch_size=None, num_workers=2)
    keys: list[str] = []
    for epoch in range(EPOCHS):
        dataset.set_epoch(epoch)
        keys += [sample["__key__"] for sample in loader]
    return len(keys), len(set(keys))


def half(place: Workplace) -> list[Row]:
    """Return the bytes that the store sent, from one run."""
    # The number of shards decides what MIN can do, so the scale changes their size.
    kind = Kind(
        "half",
        "100 KB",
        (("jpg", 100_000),),
        HALF_SHARDS * _SHARD_BYTES,
        round(_SHARD_BYTES * place.scale),
    )
    dataset = place.dataset(kind)
    shard_bytes = dataset.tar_bytes // len(dataset.shards)
    room = len(dataset.shards) // 2 + HALF_JOBS * WORKERS
    epoch_s = dataset.samples / SAMPLES_PER_S
    with place.far_store(dataset) as store, place.folder() as folder:
        # The half shard is for what the cache keeps next to the tars, and too small for one more of
        # them.
        with place.daemon(f"{int((room + 0.5) * shard_bytes)}", store) as daemon:
            jobs = [
                command(
                    train,
                    contender="shardcache",
                    source=f"s3://{dataset.folder.name}/{dataset.names}",
                    samples=dataset.samples,
                    epochs=HALF_EPOCHS,
                    seed=number,
                    job=f"job-{number}",
                    socket=str(daemon.socket),
                    start_after_s=number * _STAGGER_EPOCHS * epoch_s,
                    reads=str(folder / "reads"),
                )
                for number in range(HALF_JOBS)
            ]
            for number, found in enumerate(call_together(jobs)):
                place.say(f"job {number}: {Course(**found)}")
            store_bytes = store.stats().sent_bytes
        begun = sorted(
            (float(at), url)
            for at, url in map(str.split, (folder / "reads").read_text().splitlines())
        )
    # MIN may evict at once what a reader still holds: each read ends when it begins.
    reads = [Read(at, 0, 0, number, url, end_s=at) for number, (at, url) in enumerate(begun)]
    best = sum(1 for _ in misses(reads, furthest_next(reads), room)) * shard_bytes
    what = f"from the store, {HALF_JOBS} jobs × {HALF_EPOCHS} epochs"
    return [Row("MB", what, store_bytes / 1e6, "offline MIN", best / 1e6, Target("≤", 1.03))]
