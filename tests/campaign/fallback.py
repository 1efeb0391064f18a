"""Jobs that read past a daemon that is killed, frozen or too small, and go back to it: sample for sample."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from campaign.harness import Result, Row, scaled
from shardcache.errors import ShardcacheError
from shardcache.protocol import ShardRef
from shardcache_client.daemon.choice import DaemonChoice, Patience
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.session import Session, resolve
from shardcache_client.order.manifest import Plan
from shardcache_client.reading.shard_window import ShardWindow
from support.programs.daemon import Daemon
from support.programs.private import private_home
from support.shards.tars import random_samples, write_shards

SHARDS, SAMPLES = 12, 20
SIZES = {"jpg": 20_000}
CAPACITY = "1200KB"  # of two shards
REACH = 2 * SAMPLES  # so many samples on, the reader is at a shard that was neither in hand nor asked for
EPOCHS = 40
LIMIT_S = 120.0
GRACE_S = 0.3
READER = ReaderIdentity("job")

Pair = tuple[str, bytes]


@dataclass(frozen=True, slots=True)
class Trouble:
    """Fault of a daemon at one sample of an epoch, and its repair at a later one."""

    name: str
    begin: Callable[[Daemon], None]
    mend: Callable[[Daemon], None]


TROUBLES = (
    Trouble("daemon killed, a private one, and back", Daemon.kill, Daemon.start),
    Trouble("daemon frozen, a private one, and back", Daemon.pause, Daemon.go_on),
)


@dataclass(frozen=True, slots=True)
class Ground:
    folder: Path
    shards: tuple[ShardRef, ...]


@contextmanager
def ground(folder: Path, _scale: float) -> Iterator[Ground]:
    logging.getLogger("shardcache").addHandler(logging.NullHandler())  # what it says each time would hide the table
    (folder / "source").mkdir()
    write_shards(folder / "source", SHARDS, SAMPLES, SIZES)
    with private_home(folder):
        yield Ground(folder, tuple(resolve(DaemonChoice(None), READER, [f"file://{folder}/source/"], LIMIT_S)))


def troubled(trouble: Trouble, ground: Ground, result: Result, scale: float) -> None:
    rng = random.Random(5)
    root = ground.folder / str(TROUBLES.index(trouble))
    root.mkdir()
    with Daemon(root, capacity=CAPACITY) as daemon:
        for epoch in range(scaled(EPOCHS, scale, 2)):
            order = tuple(rng.sample(range(SHARDS), SHARDS))
            away, back = sorted(rng.sample(range(SHARDS * SAMPLES), 2))
            _epoch(result, daemon, trouble, Plan(epoch, ground.shards, order, reads=SHARDS), away, back)


def _epoch(result: Result, daemon: Daemon, trouble: Trouble, plan: Plan, away: int, back: int) -> None:
    """Read an epoch; the daemon is in trouble between two of its samples."""
    how = f"{trouble.name}: order {plan.order}, between samples {away} and {back}"
    patience = Patience(LIMIT_S, grace_s=GRACE_S, retry_s=GRACE_S)
    shard_source = Session(DaemonChoice(daemon.socket, fallback=True), READER, patience, partial_reads=True)
    samples = _samples(shard_source, plan)
    read = list(islice(samples, away + 1))
    trouble.begin(daemon)
    result.injected += 1
    try:
        begun_s = time.monotonic()
        if back - away >= REACH:
            read += islice(samples, REACH)
            result.recovery_s.append(time.monotonic() - begun_s)
        read += islice(samples, back + 1 - len(read))
    except ShardcacheError as exn:
        result.fail("lost", f"{how}: {exn}")
    finally:
        trouble.mend(daemon)
    try:
        read += samples
    except ShardcacheError as exn:
        result.fail("lost", f"{how}: {exn}")
    _judge(result, how, read, [sample for shard in plan.order for sample in _packed(shard)])


def _judge(result: Result, how: str, read: list[Pair], expected: list[Pair]) -> None:
    if [key for key, _ in read] != [key for key, _ in expected]:
        result.fail("lost", f"{how}: {len(read)} samples of {len(expected)} came, or in another order")
    elif read != expected:
        result.fail("wrong", f"{how}: a sample has other bytes")


def _samples(shard_source: Session, plan: Plan) -> Iterator[Pair]:
    shard_source.declare(plan)
    shard_window = ShardWindow(shard_source, plan.reads, partial=None, handover=None)
    try:
        for _ in range(plan.reads):
            leased_shard = shard_window.take(0, SAMPLES, (0, None))
            leased_shard.open()
            shard_window.ask(1)
            for sample in leased_shard.samples():
                yield sample["__key__"], sample["jpg"]
            shard_window.give_back(leased_shard)
    finally:
        shard_window.empty()
        shard_source.close()


def _packed(shard: int) -> Iterator[Pair]:
    for sample in random_samples(SAMPLES, SIZES, first=shard * SAMPLES):
        yield str(sample["__key__"]), bytes(sample["jpg"])  # type: ignore[arg-type]


ROWS = tuple(Row(trouble.name, partial(troubled, trouble)) for trouble in TROUBLES)
