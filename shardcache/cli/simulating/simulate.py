"""`shardcache simulate`: fetches of a training run, in the real order, by the real schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardcache.cli import common
from shardcache.errors import CapacityError, ConfigError
from shardcache.plan.replay import Read, Replay, Sizes, furthest_next, misses
from shardcache.shared.protocol import Json
from shardcache.shared.units import duration, size

if TYPE_CHECKING:
    from shardcache_client.order.shards.manifest import Manifest

NO_CACHE = "none"
POLICIES = ("shardcache", "MIN", "LRU", NO_CACHE)
_PART_BYTES = 8 * 1024 * 1024
_COUNT = click.IntRange(1)
_WORKERS_HELP = "Worker processes per rank; all of them visit the same shards. 1 for threads."
# Formats of the forecast's figures; all others are bytes.
_UNITS: dict[str, Any] = {
    "hits": "{:.1%}".format,
    "requests": "{:,}".format,
    "cost": "{:,.2f}".format,
}

# The drawing of hit rates, `hits.svg`: its curves have a point for each step of the disk's size.
_STEPS = 8
_LEFT = 60
_WIDTH = 600
_TOP = 50
_HEIGHT = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """A training run, by its options.

    A sample takes each rank a second. Jobs begin together, or spread evenly over an epoch.

    Attributes:
        manifest: of the dataset, with sizes and sample counts.
        disk: capacity of each node's cache, in bytes.
        nodes: number of nodes.
        ranks: number of ranks of a job on each node.
        workers: number of processes of each rank.
        epochs: number of epochs of each job.
        jobs: number of jobs on the same nodes.
        together: True if the jobs begin at the same time.
        tier: True if the nodes have a tier.
        shuffle, window, canonical_nodes: the dataset's shuffle.
        batch_size: of each rank, in samples.
    """

    manifest: Manifest
    disk: int
    nodes: int
    ranks: int
    workers: int
    epochs: int
    jobs: int
    together: bool
    tier: bool
    shuffle: bool
    window: int
    canonical_nodes: int
    batch_size: int

    def size_bytes(self, shard: str) -> int:
        """Return the size of a shard, whose name is its number."""
        return self.manifest.shards.sizes[int(shard)]

    def reads(self, node: int) -> list[Read]:
        """Return the visits of all ranks of a node to shards, in order.

        The worker processes of a rank visit the same shards, at nearly the same times.
        """
        from shardcache_client.order.dealing.assignment import Assignment
        from shardcache_client.order.rank_epoch import RankEpoch
        from shardcache_client.order.sequences.rounds import Shuffle, Topology

        deals = []
        for seed in range(self.jobs):
            shuffle = Shuffle(seed, self.window, self.canonical_nodes) if self.shuffle else None
            deals.append(Assignment(shuffle, batch_size=self.batch_size).deal(self.manifest))
        world_size = self.nodes * self.ranks
        ranks = range(node * self.ranks, (node + 1) * self.ranks)
        epoch_s = (self.manifest.samples or 0) / world_size + self.batch_size

        found = list[Read]()
        for epoch, (job, deal) in product(range(self.epochs), enumerate(deals)):
            late_epochs = 0.0 if self.together else job / self.jobs
            begin_s = epoch_s * (epoch + late_epochs)
            for session, rank in enumerate(ranks, job * self.ranks):
                share = deal.share(epoch, 0, Topology(rank, world_size))
                for position, visit in enumerate(RankEpoch(share, self.manifest).visits()):
                    start_s = begin_s + visit.first
                    end_s = begin_s + visit.end
                    found.append(Read(start_s, session, epoch, position, str(visit.shard), end_s))
        return sorted(found)

    def process_reads(self, reads: Sequence[Read]) -> int:
        """Return the number of reads by all processes: each visits all shards of its rank."""
        return len(reads) * self.workers

    def cached_bytes(self, shard: str) -> int:
        """Return the space that a shard takes in the cache.

        Its sidecar has a typical size: an index file does not say how many members a sample has.
        """
        from shardcache.store.space import typical_sidecar_bytes

        samples = self.manifest.shards.samples[int(shard)]
        return self.size_bytes(shard) + typical_sidecar_bytes(samples)

    def reserved_bytes(self, shard: str) -> int:
        """Return the space that the daemon reserves for a shard before it fetches it."""
        from shardcache.store.space import footprint_bytes

        # For an index of many tiny samples, the daemon enlarges the reservation.
        return max(footprint_bytes(self.size_bytes(shard)), self.cached_bytes(shard))

    def fetches(self, reads: Sequence[Read], disk_bytes: int) -> tuple[dict[str, list[str]], int]:
        """Return what each policy fetches for a node's reads, and the space that is used.

        Raises CapacityError.
        """
        self.check_largest(reads, disk_bytes)
        sizes = Sizes(reserved=self.reserved_bytes, cached=self.cached_bytes)
        ours = Replay(reads, disk_bytes, sizes)
        least_recent = range(0, -len(reads), -1)  # the earlier a read, the higher its rank
        fetched = {
            "shardcache": ours.fetched,
            "MIN": [*misses(reads, furthest_next(reads), disk_bytes, sizes)],
            "LRU": [*misses(reads, least_recent, disk_bytes, sizes)],
            NO_CACHE: [read.shard for read in reads] * self.workers,
        }
        return fetched, ours.peak_bytes

    def check_largest(self, reads: Sequence[Read], disk_bytes: int) -> None:
        """Raise CapacityError if a node's disk does not hold the largest of its shards alone."""
        largest = max({read.shard for read in reads}, key=self.reserved_bytes)
        reserved_bytes = self.reserved_bytes(largest)
        if reserved_bytes > disk_bytes:
            taken = size(reserved_bytes)
            whole = size(disk_bytes)
            raise CapacityError(
                f"the shard takes {taken} while it is fetched, and a node's disk has {whole}",
                url=self.manifest[int(largest)].url,
                remedy="raise --disk, or write smaller shards",
            )

    def first_batch_bytes(self, reads: Sequence[Read]) -> float:
        """Return what a node receives until each rank of the first job has a batch.

        All ranks receive alike.
        """
        if not self.window:  # from the beginning of a shard that is still arriving
            sample_bytes = sum(self.manifest.shards.sizes) / (self.manifest.samples or 1)
            return float(self.ranks * self.batch_size * sample_bytes)
        first = {
            read.shard
            for read in reads
            if read.session < self.ranks and read.start_s < self.batch_size
        }
        return sum(map(self.size_bytes, first))

    def figures(self, policy: str, fetched: Counter[str], reads: int) -> Json:
        """Return the figures of a policy.

        With a tier, the store sends each shard once, and each node owns an equal part of them.

        Args:
            policy: one of `POLICIES`.
            fetched: how often each shard was fetched by the nodes.
            reads: number of reads by all processes.
        """
        from shardcache.config.origin_table import table_of
        from shardcache.config.settings import Settings

        has_tier = self.tier and policy != NO_CACHE
        sent = Counter(set(fetched)) if has_tier else fetched
        store_bytes = self._total_bytes(sent)
        requests = self.questions(policy, fetched.total(), reads)
        for shard, times in sent.items():
            parts = -(-self.size_bytes(shard) // _PART_BYTES)  # rounded up
            requests += times * parts
        between_nodes_bytes = 0
        if has_tier:
            share_of_others = 1 - 1 / self.nodes
            between_nodes_bytes = round(self._total_bytes(fetched) * share_of_others)
        table = table_of(Settings.load({}).origin, self.manifest[0].url)
        return {
            "hits": 1 - fetched.total() / reads,
            "store_bytes": store_bytes,
            "requests": requests,
            "between_nodes_bytes": between_nodes_bytes,
            "cost": table.cost(store_bytes, requests),
        }

    def _total_bytes(self, fetched: Counter[str]) -> int:
        return sum(times * self.size_bytes(shard) for shard, times in fetched.items())

    def questions(self, policy: str, fetches: int, reads: int) -> int:
        """Return the number of requests that bring no bytes of shards, at most.

        A daemon asks for a shard's version when it fetches it, and again when a reader gets it,
        unless that is within `--listing-ttl-s`. The tier asks whether the node that fetches may,
        unless another one of the same access key asked within `--trust-s`.
        """
        if policy == NO_CACHE:
            return reads
        permissions = fetches if self.tier else 0
        return fetches + reads + permissions

    def picture(self) -> str:
        """Return a drawing of the first node's hit rates, by the size of its disk.

        Sizes reach up to that for all shards which the node reads.
        """
        reads = self.reads(0)
        points = dict.fromkeys(POLICIES, "")
        whole_bytes = 1.05 * sum(map(self.cached_bytes, {read.shard for read in reads}))
        for step in range(1, _STEPS + 1):
            share = step / _STEPS
            with suppress(CapacityError):
                fetched_by_policy, _ = self.fetches(reads, int(whole_bytes * share))
                for policy, fetched in fetched_by_policy.items():
                    missed = len(fetched) / self.process_reads(reads)
                    x = _LEFT + _WIDTH * share
                    y = _TOP + _HEIGHT * missed
                    points[policy] += f"{x:.0f},{y:.1f} "
        sizes = {f"quarter{number}": size(whole_bytes * number / 4) for number in (1, 2, 4)}
        return Path(__file__).with_name("hits.svg").read_text().format(**points, **sizes)


def _manifest(index: Path) -> Manifest:
    from shardcache.shared.lists import shardlist
    from shardcache.shared.lists.shard_columns import Shards
    from shardcache_client.order.shards.manifest import Manifest

    try:
        manifest = Manifest(Shards.of_columns(shardlist.read(index.read_bytes())))
        if not manifest.samples or -1 in manifest.shards.sizes:
            raise ValueError("it has no samples, or no sample counts or sizes")
    except (OSError, ValueError) as exn:
        remedy = "write it with: shardcache index URL... -o FILE"
        raise ConfigError(
            f"cannot simulate with this index: {exn}",
            url=str(index),
            remedy=remedy,
        ) from None
    return manifest


def _picture(_ctx: click.Context, _param: click.Parameter, picture: Path | None) -> Path | None:
    """Raise ConfigError for a picture in a missing folder, before anything is computed."""
    if picture is not None and not picture.parent.is_dir():
        raise ConfigError(
            "cannot write the picture: the folder does not exist",
            url=str(picture.parent),
            remedy="create the folder, or name another",
        )
    return picture


def _draw(run: SimulatedRun, picture: Path) -> None:
    drawn = run.picture()
    try:
        picture.write_text(drawn)
    except OSError as exn:
        raise ConfigError(
            f"cannot write the picture ({exn.strerror})",
            url=str(picture),
            remedy="name a file that this user may write",
        ) from exn


@common.examples(
    "simulate index.json --disk 500GB --nodes 4",
    "simulate index.json --disk 2TB --tier --picture hits.svg",
)
@click.command(context_settings={"show_default": True})
@click.argument("index", type=click.Path(path_type=Path))
@click.option(
    "--disk",
    type=common.parse_size,
    required=True,
    metavar="SIZE",
    help="Capacity of each node's cache.",
)
@click.option("--nodes", type=_COUNT, default=1, help="Number of nodes, each with a daemon.")
@click.option("--ranks", type=_COUNT, default=8, help="Ranks per node.")
@click.option("--workers", type=_COUNT, default=4, help=_WORKERS_HELP)
@click.option("--epochs", type=_COUNT, default=10, help="Epochs per job.")
@click.option(
    "--jobs",
    type=_COUNT,
    default=1,
    help="Number of jobs on the same nodes, each with a seed of its own.",
)
@click.option(
    "--together",
    is_flag=True,
    help="Start all jobs at the same time, instead of spread evenly over an epoch.",
)
@click.option(
    "--tier",
    is_flag=True,
    help="Simulate a tier: together, the nodes' disks hold each shard once.",
)
@click.option(
    "--shuffle/--no-shuffle",
    default=True,
    help="Shuffle the samples, as the dataset's shuffle does.",
)
@click.option(
    "--global-shuffle",
    is_flag=True,
    help='Permute all samples, as shuffle="global" does.',
)
@click.option(
    "--range-part-size",
    type=common.parse_size,
    metavar="SIZE",
    help="The daemon's range_part_size, for --global-shuffle.  [default: as configured]",
)
@click.option(
    "--whole-from-percent",
    type=click.IntRange(1, 100),
    help="The daemon's whole_from_percent, for --global-shuffle.  [default: as configured]",
)
@click.option(
    "--shuffle-window",
    type=click.IntRange(0),
    default=8,
    help="The dataset's shuffle_window.",
)
@click.option("--canonical-nodes", type=_COUNT, default=1, help="The dataset's canonical_nodes.")
@click.option("--batch-size", type=_COUNT, default=1, help="Samples per batch of each rank.")
@click.option(
    "--line",
    type=common.parse_size,
    default="10Gbit",
    metavar="SIZE",
    help="Network bandwidth per node.",
)
@click.option(
    "--picture",
    type=click.Path(path_type=Path, dir_okay=False),
    callback=_picture,
    help="Draw the hit rates of a range of disk sizes into this file (.svg).",
)
@common.json_option
def simulate(
    index: Path,
    line: int,
    picture: Path | None,
    as_json: bool,
    shuffle: bool,
    shuffle_window: int,
    global_shuffle: bool,
    range_part_size: int | None,
    whole_from_percent: int | None,
    **options: Any,
) -> None:
    """Compute what a training run would fetch, from the dataset's index file (INDEX).

    Use it to choose a disk. The order of samples and the daemons' decisions are the real ones;
    transfers take no time. Costs come from the prices in the daemon's config. A hit is a visit of a
    process to a shard that needs no fetch.

    Three other policies are shown for comparison. MIN knows the future and evicts the shard that is
    read again last, which is the best possible if all shards have one size. LRU evicts the shard
    that was read least recently. With none, each process fetches for itself.

    With --global-shuffle, samples are read one by one, and hits are reads of samples. This needs
    the table of samples beside the index file.
    """
    window = shuffle_window if shuffle else 0
    run = SimulatedRun(manifest=_manifest(index), shuffle=shuffle, window=window, **options)
    if global_shuffle:
        _check_global(run, picture)
        forecast = _forecast_of_samples(run, index, line, range_part_size, whole_from_percent)
    else:
        forecast = _forecast(run, line)
    if picture is not None:
        _draw(run, picture)
    if as_json:
        common.print_json(forecast)
    else:
        _print_forecast(forecast, has_tier=run.tier)


def _check_global(run: SimulatedRun, picture: Path | None) -> None:
    """Raise UsageError for options that a permutation of all samples does not have."""
    if not run.shuffle or run.canonical_nodes > 1:
        raise click.UsageError(
            "--global-shuffle permutes all samples: omit --no-shuffle and --canonical-nodes",
        )
    if run.tier or picture is not None:
        raise click.UsageError("--tier and --picture do not simulate --global-shuffle: omit them")


def _forecast_of_samples(
    run: SimulatedRun,
    index: Path,
    line: int,
    range_part_size: int | None,
    whole_from_percent: int | None,
) -> Json:
    """Return what is fetched if all samples are permuted, as `_forecast` does."""
    from shardcache.cli.simulating.sample_simulation import SamplePositions, SampleSimulation
    from shardcache.config.origin_table import table_of
    from shardcache.config.settings import Settings

    settings = Settings.load({})
    simulation = SampleSimulation(
        run,
        SamplePositions.read(index, run.manifest),
        range_part_size or settings.range_part_size,
        whole_from_percent or settings.whole_from_percent,
    )
    return simulation.forecast(line, table_of(settings.origin, run.manifest[0].url))


def _forecast(run: SimulatedRun, line: int) -> Json:
    """Return what each policy fetches, and the disks and the time that the run takes, as JSON."""
    all_reads = 0
    disk_bytes = 0
    first_batch_s = 0.0
    fetched = {name: Counter[str]() for name in POLICIES}
    for node in range(run.nodes):
        reads = run.reads(node)
        found, used_bytes = run.fetches(reads, run.disk)
        for name, shards in found.items():
            fetched[name].update(shards)
        all_reads += run.process_reads(reads)
        disk_bytes = max(disk_bytes, used_bytes)
        first_batch_s = max(first_batch_s, run.first_batch_bytes(reads) / line)
    policies = {name: run.figures(name, shards, all_reads) for name, shards in fetched.items()}
    return {
        "policies": policies,
        "disk_bytes": disk_bytes,
        "tier_disk_bytes": sum(run.manifest.shards.sizes) // run.nodes if run.tier else 0,
        "first_batch_s": first_batch_s,
    }


def _print_forecast(forecast: Json, *, has_tier: bool) -> None:
    policies = forecast["policies"]
    rows = []
    for key in policies["shardcache"]:
        values = [each[key] for each in policies.values()]
        if any(values):
            rows.append([key.replace("_", " "), *map(_UNITS.get(key, size), values)])
    common.print_table(["", *policies], rows, tuple(policies))
    disk = size(forecast["disk_bytes"])
    if has_tier:
        disk += f" and {size(forecast['tier_disk_bytes'])} of the tier"
    first_batch = duration(forecast["first_batch_s"])
    click.echo(f"disk of a node {disk}, first batch after {first_batch}")
