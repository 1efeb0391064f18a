"""`shardcache simulate`: computes what a training run would fetch, without its data.

`SimulatedRun` computes the fetches of whole shards, and `SampleSimulation` those of single samples
(--global-shuffle). A policy is a way in which a node's cache decides what to fetch and evict. The
forecast is a JSON object with the figures of each policy, the space needed on a disk, and the time
to the first batch.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardcache.cli import common
from shardcache.cli.simulating.simulated_run import POLICIES, SimulatedRun
from shardcache.shared.exceptions import ConfigError
from shardcache.shared.protocol import Json
from shardcache.shared.units import duration, size

if TYPE_CHECKING:
    from shardcache_client.order.shards.manifest import Manifest

_COUNT = click.IntRange(1)
_WORKERS_HELP = "Worker processes per rank; all of them visit the same shards. 1 for threads."
# Functions that format the figures of a policy; figures that are not here are sizes in bytes.
_FORMATS: dict[str, Any] = {
    "hits": "{:.1%}".format,
    "requests": "{:,}".format,
    "cost": "{:,.2f}".format,
}


def _checked_picture(
    _ctx: click.Context, _param: click.Parameter, picture: Path | None
) -> Path | None:
    """Return the path of --picture; raise ConfigError if its folder is missing.

    The folder is checked here, before the simulation is computed, which may take long.
    """
    if picture is not None and not picture.parent.is_dir():
        raise ConfigError(
            "cannot write the picture: the folder does not exist",
            url=str(picture.parent),
            remedy="create the folder, or name another",
        )
    return picture


@common.examples(
    "simulate index.json --disk 500GB --nodes 4",
    "simulate index.json --disk 2TB --tier --picture hits.svg",
)
@click.command(context_settings={"show_default": True})
@click.argument("index", type=click.Path(path_type=Path))
@click.option(
    "--disk",
    "disk_bytes",
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
    "start_together",
    is_flag=True,
    help="Start all jobs at the same time, instead of spread evenly over an epoch.",
)
@click.option(
    "--tier",
    "has_tier",
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
    "line_bytes_per_s",
    type=common.parse_size,
    default="10Gbit",
    metavar="SIZE",
    help="Network bandwidth per node.",
)
@click.option(
    "--picture",
    type=click.Path(path_type=Path, dir_okay=False),
    callback=_checked_picture,
    help="Draw the hit rates of a range of disk sizes into this file (.svg).",
)
@common.json_option
def simulate(
    index: Path,
    line_bytes_per_s: int,
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
    run = SimulatedRun(
        manifest=_read_manifest(index),
        is_shuffled=shuffle,
        window=shuffle_window if shuffle else 0,
        **options,  # they have the names of the fields
    )
    if global_shuffle:
        _check_global_options(run, picture)
        forecast = _forecast_of_samples(
            run, index, line_bytes_per_s, range_part_size, whole_from_percent
        )
    else:
        forecast = _forecast(run, line_bytes_per_s)
    if picture is not None:
        _write_picture(run, picture)
    if as_json:
        common.print_json(forecast)
    else:
        _print_forecast(forecast, has_tier=run.has_tier)


def _read_manifest(index: Path) -> Manifest:
    """Read an index file. Raises ConfigError unless it has each shard's size and sample count."""
    from shardcache.shared.lists import shardlist
    from shardcache.shared.lists.shard_columns import Shards
    from shardcache_client.order.shards.manifest import Manifest

    try:
        columns = shardlist.read(index.read_bytes())
        manifest = Manifest(Shards.of_columns(columns))
        lacks_sizes = -1 in manifest.shards.sizes  # -1 stands for an unknown size
        if not manifest.samples or lacks_sizes:
            raise ValueError("it has no samples, or no sample counts or sizes")
    except (OSError, ValueError) as exn:
        raise ConfigError(
            f"cannot simulate with this index: {exn}",
            url=str(index),
            remedy="write it with: shardcache index URL... -o FILE",
        ) from None
    return manifest


def _check_global_options(run: SimulatedRun, picture: Path | None) -> None:
    """Raise UsageError for options that contradict --global-shuffle, or are not simulated with it.

    Args:
        run: the run.
        picture: the value of --picture.
    """
    if not run.is_shuffled or run.canonical_nodes > 1:
        raise click.UsageError(
            "--global-shuffle permutes all samples: omit --no-shuffle and --canonical-nodes",
        )
    if run.has_tier or picture is not None:
        raise click.UsageError("--tier and --picture do not simulate --global-shuffle: omit them")


def _forecast_of_samples(
    run: SimulatedRun,
    index: Path,
    line_bytes_per_s: int,
    range_part_size: int | None,
    whole_from_percent: int | None,
) -> Json:
    """Return the forecast for a permutation of all samples, with the fields of `_forecast`.

    Args:
        run: the run.
        index: path of the index file, whose table of samples is read.
        line_bytes_per_s: bandwidth of each node's network.
        range_part_size: the daemon's option of that name; None for the configured value.
        whole_from_percent: the daemon's option of that name; None for the configured value.
    """
    from shardcache.cli.simulating.sample_simulation import SamplePositions, SampleSimulation
    from shardcache.config.origin_table import table_of
    from shardcache.config.settings import Settings
    from shardcache.plan.object_parts import whole_share

    settings = Settings.load({})  # from environment and config file
    table = table_of(settings.origin, run.manifest[0].url)
    part_bytes = range_part_size or settings.range_part_size
    max_share = whole_share(
        whole_from_percent or settings.whole_from_percent,
        part_bytes,
        table.price_per_gb,
        table.price_per_1000_requests,
    )
    simulation = SampleSimulation(
        run,
        SamplePositions.read(index, run.manifest),
        part_bytes=part_bytes,
        max_share=max_share,
    )
    return simulation.forecast(line_bytes_per_s, table)


def _forecast(run: SimulatedRun, line_bytes_per_s: int) -> Json:
    """Return the forecast for a run that reads whole shards.

    Args:
        run: the run.
        line_bytes_per_s: bandwidth of each node's network.
    """
    read_count = 0
    disk_bytes = 0
    first_batch_s = 0.0
    # For each policy, the number of fetches of each shard by all nodes.
    fetched = {policy: Counter[str]() for policy in POLICIES}
    for node in range(run.nodes):
        reads = run.reads(node)
        fetched_by_policy, peak_bytes = run.fetches(reads, run.disk_bytes)
        for policy, shards in fetched_by_policy.items():
            fetched[policy].update(shards)
        read_count += run.process_reads(reads)
        disk_bytes = max(disk_bytes, peak_bytes)
        first_batch_s = max(first_batch_s, run.first_batch_bytes(reads) / line_bytes_per_s)
    tier_disk_bytes = 0
    if run.has_tier:
        tier_disk_bytes = sum(run.manifest.shards.sizes) // run.nodes
    return {
        "policies": {
            policy: run.figures(policy, counts, read_count) for policy, counts in fetched.items()
        },
        "disk_bytes": disk_bytes,
        "tier_disk_bytes": tier_disk_bytes,
        "first_batch_s": first_batch_s,
    }


def _write_picture(run: SimulatedRun, file: Path) -> None:
    """Write the drawing of a run's hit rates to a file. Raises ConfigError."""
    picture = run.picture()
    try:
        file.write_text(picture)
    except OSError as exn:
        raise ConfigError(
            f"cannot write the picture ({exn.strerror})",
            url=str(file),
            remedy="name a file that this user may write",
        ) from exn


def _print_forecast(forecast: Json, *, has_tier: bool) -> None:
    """Print a table with a row per figure and a column per policy, and the needs of a node."""
    policies = forecast["policies"]
    rows = []
    for name in policies["shardcache"]:
        values = [figures[name] for figures in policies.values()]
        if any(values):
            as_text = _FORMATS.get(name, size)
            rows.append([name.replace("_", " "), *map(as_text, values)])
    common.print_table(["", *policies], rows, tuple(policies))
    disk = size(forecast["disk_bytes"])
    if has_tier:
        disk += f" and {size(forecast['tier_disk_bytes'])} of the tier"
    first_batch = duration(forecast["first_batch_s"])
    click.echo(f"disk of a node {disk}, first batch after {first_batch}")
