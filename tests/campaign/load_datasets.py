"""Datasets as users have them, each in a process of its own that may be killed or frozen at any moment."""

from __future__ import annotations

import asyncio
import itertools
import logging
import multiprocessing
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from campaign.harness import Result
from shardcache.errors import ShardcacheError
from support.stores.moody_s3 import SHARDS, samples, url

# torch takes seconds to import: one process does so, and all readers are its forks.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([__name__, "shardcache_client"])

_SHARDS = 20
_TIMEOUT_S = 120.0
_LISTEN_S = 0.5  # before a pipe is full and holds up its reader


def _read(socket: Path, job: str, seed: int, told: Connection) -> None:
    """Read epochs forever; tell of each `(samples, wrong ones, lost or repeated ones)`, or the error that ended it."""
    from shardcache_client import ShardDataset

    logging.disable()  # that it waits is what a reader is here for
    numbers = random.Random(seed).sample(range(SHARDS), _SHARDS)
    due = {str(each["__key__"]): each["bin"] for number in numbers for each in samples(number)}
    urls = [url(number) for number in numbers]
    dataset = ShardDataset(urls, shuffle=True, shuffle_window=2, socket=socket, job=job, timeout_s=_TIMEOUT_S)
    for epoch in itertools.count():
        dataset.set_epoch(epoch)
        came: Counter[str] = Counter()
        wrong = 0
        try:
            for sample in dataset:
                came[sample["__key__"]] += 1
                wrong += sample["bin"] != due[sample["__key__"]]
        except ShardcacheError as exn:
            told.send((type(exn).__name__, str(exn)))
            continue
        told.send((came.total(), wrong, sum(abs(came[key] - 1) for key in due)))


@dataclass(slots=True)
class Reader:
    """One process."""

    job: str  # under which the daemon shows it, and nobody else
    spared: bool  # whether it may live until the end; every other one is killed again and again
    process: ForkServerProcess
    told: Connection

    def kill(self) -> None:
        """End it with SIGKILL."""
        self.process.kill()
        self.process.join()

    def freeze(self) -> None:
        """Let it stand still."""
        os.kill(self._pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it continue."""
        os.kill(self._pid, signal.SIGCONT)

    @property
    def _pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid


@dataclass(slots=True)
class Datasets:
    """So many of them.

    Attributes:
        epochs: that came to their end, and what was wrong with them.
    """

    socket: Path
    epochs: Result = field(default_factory=lambda: Result("epochs of datasets among all this"))
    refused: Counter[str] = field(default_factory=Counter)  # epochs that ended in an error, by its class
    running: list[Reader] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def victims(self) -> list[Reader]:
        """Those that may be killed."""
        return [reader for reader in self.running if not reader.spared]

    def start(self, *, spared: bool = False) -> None:
        """Start one more."""
        seed = next(self._numbers)
        here, there = _FORKS.Pipe(duplex=False)
        job = f"dataset-{seed}"
        process = _FORKS.Process(target=_read, args=(self.socket, job, seed, there), daemon=True)
        process.start()
        there.close()
        self.running.append(Reader(job, spared, process, here))

    def kill(self, reader: Reader) -> None:
        """Kill one, hearing first what it had to tell."""
        if reader in self.running:
            self.running.remove(reader)
        reader.kill()
        self._hear(reader)
        reader.told.close()

    async def listen(self) -> None:
        """Take in what all of them have to tell, until cancelled."""
        while True:
            await asyncio.sleep(_LISTEN_S)
            for reader in self.running:
                self._hear(reader)

    def end(self) -> None:
        """Kill all of them."""
        while self.running:
            self.kill(self.running[0])

    def _hear(self, reader: Reader) -> None:
        try:
            while reader.told.poll():
                self._count(reader, reader.told.recv())
        except EOFError:
            if reader.process.exitcode != -signal.SIGKILL:
                self.epochs.fail("untyped", f"{reader.job} ended by itself: {reader.process.exitcode}")

    def _count(self, reader: Reader, story: tuple[str, str] | tuple[int, int, int]) -> None:
        if isinstance(story[0], str):
            self.refused[story[0]] += 1
            if story[0] in ("ShardTimeoutError", "NoDaemonError"):
                self.epochs.fail("hangs", f"{reader.job}: {story}")
            return
        self.epochs.injected += 1
        _, wrong, lost = story
        if wrong:
            self.epochs.fail("wrong", f"{reader.job}: {wrong} samples")
        if lost:
            self.epochs.fail("lost", f"{reader.job}: {lost} samples")
