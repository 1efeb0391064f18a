"""Shards as a Ray Data dataset. Each shard is read on a node of the Ray cluster that has it cached.

from shardcache_client.ray import read_shards

dataset = read_shards("s3://bucket/train-{000000..000999}.tar")

Ray runs reading tasks on its nodes. Each task reads some shards through the daemon of its node, and
yields blocks, which are pyarrow tables.
"""

import os
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pyarrow
import ray
import ray.data
from ray.data import Datasource, ReadTask
from ray.data.block import BlockMetadata
from ray.util.annotations import RayDeprecationWarning
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shardcache.shared.exceptions import NoDaemonError
from shardcache.shared.unix_socket import cached_urls
from shardcache.shared.urls.local_urls import absolute_urls
from shardcache_client.arguments.values import converted_argument
from shardcache_client.batches.maker import BadCounts
from shardcache_client.batches.rank_chunks import RankChunks
from shardcache_client.batches.rank_work import Reading
from shardcache_client.daemon.choice import DaemonChoice, Fallback
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.patience import Patience
from shardcache_client.daemon.private_start import ensure_started
from shardcache_client.daemon.reader_sessions import ReaderSessions
from shardcache_client.daemon.session import resolve
from shardcache_client.daemon.session_pool import SessionPool
from shardcache_client.handlers import Handler, reraise
from shardcache_client.order.dealing.deal_options import DealOptions
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.order.topology import Topology
from shardcache_client.parts.dataset_arguments import ARGUMENTS
from shardcache_client.position.progress import Progress
from shardcache_client.position.staged_state import Resume
from shardcache_client.ranks.environment import job_name
from shardcache_client.reading.epochs.epoch_plans import SampleForm
from shardcache_client.stages.pipeline import Pipeline

_BLOCK_BYTES = 64 * 1024 * 1024  # number of bytes of samples in one of Ray's blocks
_STATUS_TIMEOUT_S = 60.0  # time limit for a daemon's list of its cached shards


def read_shards(
    urls: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    on_error: Handler | str = reraise,
    fallback: Fallback = "error",
    timeout_s: float = 300.0,
    override_num_blocks: int | None = None,
    num_cpus: float | None = None,
) -> ray.data.Dataset:
    """Return the samples of tar shards as a Ray Data dataset, read through the nodes' daemons.

    A row has `__key__` and `__url__` (string), and each member under its extension (binary, null if
    missing). A shard is read on a node that has it cached. Shards that no node has cached are
    assigned so that nodes read equal numbers of bytes. If a node is lost, its shards are read on
    other nodes.

    Args:
        urls: a brace pattern, glob, prefix ending in "/", index file (.json, wids format), local
            path, or a list of urls.
        on_error: as for ShardDataset; called in the reading task.
        fallback: as for ShardDataset: "private" reads through a private daemon while the node's
            daemon cannot serve.
        timeout_s: time limit for a wait for a shard, and for a lost daemon to come back.
        override_num_blocks: number of reading tasks, at most one per shard. Default: chosen by Ray.
        num_cpus: number of CPUs that Ray reserves for a reading task. Default: Ray's default, 1.

    Raises:
        NoDaemonError: no node has a daemon.
        ConfigError: `on_error` is neither a function nor the name of a handler.
        NotFoundError, AccessDeniedError, NotAllowedError, OriginError: `urls` cannot be resolved.
    """
    handler = converted_argument("on_error", on_error, ARGUMENTS["on_error"])
    patterns = absolute_urls(urls)
    manifest, cached = _resolve_and_locate(patterns, fallback, timeout_s)
    read = partial(_read_tables, on_error=handler, fallback=fallback, timeout_s=timeout_s)
    parts = []
    for node, shards in assign(manifest, cached).items():
        tasks: int | None = None
        if override_num_blocks:
            share = len(shards) / len(manifest)
            tasks = max(1, round(override_num_blocks * share))
        # Tasks run on this node; if the node is lost, they run anywhere. Ray warns that a label
        # with a fallback will replace this strategy in 2.64. But such a label also falls back while
        # the node is merely busy: shards would then be fetched by one node after the other.
        placement = {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RayDeprecationWarning)
            parts.append(
                ray.data.read_datasource(
                    ShardDatasource(shards, read),
                    override_num_blocks=tasks,
                    num_cpus=num_cpus,
                    ray_remote_args=placement,
                )
            )
    first, *others = parts
    if not others:
        return first
    return first.union(*others)


def assign(manifest: Manifest, cached: Mapping[str, Collection[str]]) -> dict[str, Manifest]:
    """Return the shards that each node is to read, without nodes that read no shards.

    Args:
        manifest: all shards.
        cached: for each node, the urls of the shards that the node has cached.
    """
    nodes = list(cached)
    cached_sets = {node: frozenset(urls) for node, urls in cached.items()}
    # For each shard, the nodes that have it cached.
    homes = [[node for node in nodes if shard.url in cached_sets[node]] for shard in manifest]

    def number_of_choices(shard: int) -> int:
        """Return the number of nodes that a shard may be assigned to, as a key for sorting."""
        if not homes[shard]:  # any node may read the shard, so it is assigned last
            return len(nodes) + 1
        return len(homes[shard])

    # Shards with the least choice are assigned first: the other shards can then make up for uneven
    # shares.
    load_bytes = dict.fromkeys(nodes, 0)
    shares: dict[str, list[int]] = {node: [] for node in nodes}
    for shard in sorted(range(len(manifest)), key=number_of_choices):
        node = min(homes[shard] or nodes, key=load_bytes.__getitem__)
        load_bytes[node] += manifest[shard].size_bytes or 1  # without sizes, this counts shards
        shares[node].append(shard)
    return {node: manifest.of_some(sorted(shards)) for node, shards in shares.items() if shards}


class ShardDatasource(Datasource):  # type: ignore[misc]  # ray has no types where it is not installed
    """The samples of a manifest's shards, read through the daemon of each task's node.

    Args:
        manifest: the shards.
        read: yields tables of the samples of some shards; it is called in Ray's tasks.
    """

    def __init__(
        self, manifest: Manifest, read: Callable[[Manifest], Iterator[pyarrow.Table]]
    ) -> None:
        super().__init__()
        self._manifest = manifest
        self._read_tables = read

    def get_name(self) -> str:
        """Return the name of the reading stage in Ray's progress bars and dashboard."""
        return "Shards"

    def estimate_inmemory_data_size(self) -> int | None:
        """Return the size of the shards in bytes; None unless all sizes are known."""
        return _size_bytes(self._manifest)

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: object = None
    ) -> list[ReadTask]:
        """Return tasks that read consecutive shards each, in the order of the manifest.

        Args:
            parallelism: number of tasks that Ray wants; there is at most one per shard.
            per_task_row_limit: maximum number of rows that Ray takes of a task; None for no limit.
            data_context: unused.
        """
        count = len(self._manifest)
        tasks = max(1, min(parallelism, count))
        cuts = [count * number // tasks for number in range(tasks + 1)]
        parts = [self._manifest.of_some(range(*cut)) for cut in pairwise(cuts)]
        return [
            ReadTask(
                partial(self._read_tables, part),
                BlockMetadata(
                    num_rows=part.samples,
                    size_bytes=_size_bytes(part),
                    exec_stats=None,
                    input_files=tuple(shard.url for shard in part),
                ),
                per_task_row_limit=per_task_row_limit,
            )
            for part in parts
        ]


def _size_bytes(manifest: Manifest) -> int | None:
    """Return the size of all shards in bytes; None unless all sizes are known."""
    sizes = [shard.size_bytes for shard in manifest if shard.size_bytes is not None]
    return sum(sizes) if len(sizes) == len(manifest) else None


def _resolve_and_locate(
    patterns: list[str], fallback: Fallback, timeout_s: float
) -> tuple[Manifest, dict[str, Collection[str]]]:
    """Return the shards that the patterns name, and the urls that each node has cached.

    Nodes without a daemon are left out; with a fallback, they count as nodes that have cached
    nothing. Raises NoDaemonError if no node has a daemon.
    """
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    results = {node: _task_on(node, _cached_here).remote() for node in nodes}
    cached: dict[str, Collection[str]] = {}
    for node, result in results.items():
        try:
            cached[node] = ray.get(result)
        except NoDaemonError:
            if fallback == "private":
                cached[node] = ()
        except (ray.exceptions.NodeDiedError, ray.exceptions.TaskUnschedulableError):
            continue  # the node was lost since `ray.nodes` listed it
    if not cached:
        remedy = "start one on each node: shardcache serve --cache-dir DIR --capacity SIZE"
        raise NoDaemonError(
            f"none of the {len(nodes)} nodes of the Ray cluster has a daemon", remedy=remedy
        )
    manifest: Manifest = ray.get(
        _task_on(next(iter(cached)), _resolve_here).remote(patterns, fallback, timeout_s)
    )
    return manifest, cached


def _task_on(node: str, function: Any) -> Any:
    """Return a function as a remote task of Ray that runs on the given node, or fails."""
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(function).options(num_cpus=0, scheduling_strategy=strategy)


def _cached_here() -> Collection[str]:
    """Return the urls that this node has cached. Raises NoDaemonError."""
    # If no daemon was set up on a node, its tasks read through a private one, as ShardDatasets do.
    socket = DaemonChoice.of().node_socket or ensure_started()
    try:
        return frozenset(cached_urls(socket, _STATUS_TIMEOUT_S))
    except (OSError, ValueError) as exn:
        raise NoDaemonError("no daemon answers on this Ray node", url=str(socket)) from exn


def _resolve_here(patterns: list[str], fallback: Fallback, timeout_s: float) -> Manifest:
    """Return the shards that patterns name, as this node's daemon resolves them."""
    return resolve(
        DaemonChoice.of(fallback=fallback), ReaderIdentity(job_name()), patterns, timeout_s
    )


def _read_tables(
    manifest: Manifest, *, on_error: Handler, fallback: Fallback, timeout_s: float
) -> Iterator[pyarrow.Table]:
    """Yield tables of about 64 MiB with the samples of the shards, in the order of the files."""
    sessions = SessionPool(
        DaemonChoice.of(fallback=fallback), Patience(timeout_s), partial_reads=True
    )
    # This reader reads whole shards, and every sample once (even=None): no other reader has to keep
    # in step with it, and a skipped sample is not replaced.
    deal = DealOptions(even=None).deal(manifest, counted=False)
    reader = ReaderSessions(sessions, ReaderIdentity(job_name()))
    reading = Reading(deal, SampleForm(manifest), Pipeline(), reader, on_error, epochs=1)
    from_the_start = Resume(Progress())
    chunks = RankChunks(reading, from_the_start, Topology(), size=1)
    # Bad samples and steps are recorded for states, which Ray does not save.
    placed = chunks.placed_items(bad=BadCounts(), begun_steps=deque())
    samples = (item for _place, item in placed)
    yield from map(_table, _batches(samples))


def _batches(samples: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield lists of samples, each with just enough bytes for one of Ray's blocks."""
    batch: list[dict[str, Any]] = []
    size_bytes = 0
    for sample in samples:
        batch.append(sample)
        size_bytes += sum(map(len, sample.values()))
        if size_bytes >= _BLOCK_BYTES:
            yield batch
            batch = []
            size_bytes = 0
    if batch:
        yield batch


def _table(samples: list[dict[str, Any]]) -> pyarrow.Table:
    """Return samples as the rows of a table, with nulls for members that a sample lacks."""
    names = dict.fromkeys(name for sample in samples for name in sample)
    return pyarrow.table({name: [sample.get(name) for sample in samples] for name in names})
