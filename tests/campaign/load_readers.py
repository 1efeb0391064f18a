"""Readers of the load: datasets as users have them, each in a process of its own that may be killed or frozen at any
moment; and crowds of sessions in one process that speak the protocol themselves and leave as rudely as they can.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import multiprocessing
import os
import random
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import aiohttp

from campaign.harness import Result
from shardcache.errors import ShardcacheError
from shardcache.protocol import PROTOCOL_VERSION, SESSION_PATH
from support.stores.moody_s3 import SHARDS, body, samples, url

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
    """So many of them. `epochs`: that came to their end, and what was wrong with them."""

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


Json = dict[str, Any]

# Longer than all tries for one shard together.
HANG_S = 120.0
_PIECE = 4_096
_PLANS = (20, 200, SHARDS)
_MOST_READ = 40
_READING_S = 0.2


class Talk:
    """An open session."""

    def __init__(self, websocket: aiohttp.ClientWebSocketResponse) -> None:
        self._websocket = websocket
        self._requests = 0
        self._answers: dict[int, Json] = {}

    async def tell(self, kind: str, **fields: Any) -> None:
        """Send what has no answer."""
        await self._websocket.send_str(json.dumps({"type": kind, **fields}))

    async def request(self, kind: str, **fields: Any) -> int:
        """Send a request; return its id."""
        self._requests += 1
        await self.tell(kind, id=self._requests, **fields)
        return self._requests

    async def answer(self, request: int) -> Json:
        """Return a request's answer.

        Raises TimeoutError when there is none within `HANG_S`, ConnectionResetError when the daemon ends the session.
        """
        async with asyncio.timeout(HANG_S):
            while request not in self._answers:
                message = await self._websocket.receive()
                if message.type is not aiohttp.WSMsgType.TEXT:
                    raise ConnectionResetError(f"the daemon ended the session: {message}")
                answer = json.loads(message.data)
                self._answers[answer["id"]] = answer
        return self._answers.pop(request)

    async def plan(self, numbers: list[int]) -> None:
        """Declare that these shards are read, in this order."""
        for first in range(0, len(numbers), _PIECE):
            piece = numbers[first : first + _PIECE]
            shards = [[url(number), None, None, None] for number in piece]
            order = list(range(first, first + len(piece)))
            kind, fields = ("extend", {}) if first else ("plan", {"epoch": 0, "reads": len(numbers)})
            await self.answer(await self.request(kind, shards=shards, order=order, **fields))


@asynccontextmanager
async def talking(path: Path, job: str) -> AsyncIterator[Talk]:
    """Open a session that has said hello; when the block is left, the connection ends without a goodbye."""
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as client,
        client.ws_connect(f"http://daemon{SESSION_PATH}", max_msg_size=0) as websocket,
    ):
        talk = Talk(websocket)
        await talk.tell("hello", protocol=PROTOCOL_VERSION, client_version="test", job=job)
        welcome = await websocket.receive_json()
        assert welcome["type"] == "welcome", welcome
        try:
            yield talk
        finally:
            # The daemon may have been first: then there is nothing left to cut.
            with contextlib.suppress(OSError):
                websocket.get_extra_info("socket").shutdown(socket.SHUT_RDWR)


class Crowd:
    """So many readers, each of which joins, reads for a while, leaves without a word and joins again.

    Attributes:
        torn: sessions that ended so, and what was wrong with what they read.
    """

    def __init__(self, path: Path, readers: int) -> None:
        self._path = path
        self._readers = readers
        self.torn = Result(f"sessions of {readers} readers torn off in mid-read")
        self.read = 0  # shards read
        self.refused = 0  # shards that came as an error, by its code

    async def run(self) -> None:
        """Let them come and go until cancelled."""
        async with asyncio.TaskGroup() as group:
            for seed in range(self._readers):
                group.create_task(self._live(random.Random(seed), f"crowd-{seed % 8}"))

    async def _live(self, dice: random.Random, job: str) -> None:
        while True:
            try:
                async with talking(self._path, job) as talk:
                    await self._read(talk, dice)
                self.torn.injected += 1
            except TimeoutError:
                self.torn.fail("hangs", f"{job}: a request was not answered within {HANG_S:g} s")
            except (OSError, aiohttp.ClientError) as exn:
                self.torn.fail("untyped", f"{job}: {exn!r}")
                await asyncio.sleep(_READING_S)

    async def _read(self, talk: Talk, dice: random.Random) -> None:
        numbers = dice.sample(range(SHARDS), dice.choice(_PLANS))
        await talk.plan(numbers)
        ahead = await talk.request("lease", position=0)
        for position in range(min(dice.randrange(1, _MOST_READ), len(numbers) - 1)):
            asked, ahead = ahead, await talk.request("lease", position=position + 1)
            await talk.tell("need", of=asked)
            await self._check(await talk.answer(asked), numbers[position])
            await asyncio.sleep(_READING_S * dice.random())
            await talk.tell("release", lease=asked)

    async def _check(self, answer: Json, number: int) -> None:
        if answer["type"] == "error":
            self.refused += 1
            if answer["error"].get("code") in (None, "error"):
                self.torn.fail("untyped", str(answer))
            return
        try:
            found = await asyncio.to_thread(Path(answer["path"]).read_bytes)
        except FileNotFoundError:
            return  # it went between grant and need, and is asked for again
        self.read += 1
        if found != body(number):
            self.torn.fail("wrong", f"{answer} is not what the store holds")
