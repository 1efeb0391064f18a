"""Troublemakers next to the load: readers that die, freeze, flood or never listen, and users who change their minds."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

from campaign.harness import Result
from campaign.load_readers import HANG_S, Datasets, talking
from shardcache.protocol import PROTOCOL_VERSION, SESSION_PATH
from support.stores.moody_s3 import SHARDS, url

_FLOOD = 500
_HALF_OPEN = 50
_FROZEN_S = 3.0
_LOOK_S = 0.05

_HALVES = (
    b"",
    b"GET /v1/status HTTP/1.1\r\nHost: da",
    b"POST /v1/evict HTTP/1.1\r\nHost: daemon\r\nContent-Length: 1000\r\n\r\n{",
    f"GET {SESSION_PATH} HTTP/1.1\r\nHost: daemon\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode(),
)


class Troubles:
    """Each of its methods does one kind of harm once, and counts it in a result of its own."""

    def __init__(self, socket: Path, datasets: Datasets, seed: int = 0) -> None:
        self._socket = socket
        self._datasets = datasets
        self._dice = random.Random(seed)
        self.killed = Result("reading process killed: its session ends")
        self.frozen = Result(f"reading process frozen for {_FROZEN_S:g} s")
        self.flood = Result(f"flood of {_FLOOD:,} requests")
        self.deaf = Result(f"{_FLOOD:,} requests of a reader that never listens")
        self.half_open = Result("connection left half open")
        self.warm = Result("warm given up")
        self.evict = Result("shard evicted on demand")
        self._kinds: tuple[tuple[Result, Callable[[], Awaitable[None]], float], ...] = (
            (self.killed, self._kill, 4.0),
            (self.frozen, self._freeze, 6.0),
            (self.flood, self._send_flood, 7.0),
            (self.deaf, self._never_listen, 9.0),
            (self.half_open, self._open_halves, 8.0),
            (self.warm, self._give_up_warming, 5.0),
            (self.evict, self._evict, 2.0),
        )

    @property
    def results(self) -> list[Result]:
        """Outcome of each kind."""
        return [result for result, _, _ in self._kinds]

    async def run(self) -> None:
        """Do all of it again and again, each after its own pause, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for result, act, pause_s in self._kinds:
                group.create_task(self._again_and_again(result, act, pause_s))

    async def _again_and_again(self, result: Result, act: Callable[[], Awaitable[None]], pause_s: float) -> None:
        while True:
            await asyncio.sleep(pause_s * self._dice.uniform(0.5, 1.5))
            try:
                async with asyncio.timeout(HANG_S):
                    await act()
            except TimeoutError:
                result.fail("hangs", f"{result.fault}: not over within {HANG_S:g} s")

    async def _kill(self) -> None:
        victim = self._dice.choice(self._datasets.victims)
        await self._until(lambda sessions: sessions > 0, victim.job)  # it has said hello
        await asyncio.to_thread(self._datasets.kill, victim)
        begun_s = time.monotonic()
        self.killed.injected += 1
        await self._until(lambda sessions: sessions == 0, victim.job)
        self.killed.recovery_s.append(time.monotonic() - begun_s)
        await asyncio.to_thread(self._datasets.start)

    async def _until(self, condition: Callable[[int], bool], job: str) -> None:
        """Return when it is true of the number of a job's sessions, of which the daemon tells nobody."""
        while True:
            status = json.loads(await self._ask("GET", "/v1/status"))
            if condition(sum(each["sessions"] for each in status["jobs"] if each["name"] == job)):
                return
            await asyncio.sleep(_LOOK_S)

    async def _freeze(self) -> None:
        victim = self._dice.choice(self._datasets.running)
        victim.freeze()
        try:
            await asyncio.sleep(_FROZEN_S)
        finally:
            if victim in self._datasets.running:
                victim.thaw()
        self.frozen.injected += 1

    async def _send_flood(self) -> None:
        async with talking(self._socket, "flood") as talk, asyncio.TaskGroup() as group:
            asked = asyncio.Queue[int]()

            async def send() -> None:
                for _ in range(_FLOOD):
                    asked.put_nowait(await talk.request("explain", of=0))

            group.create_task(send())
            for _ in range(_FLOOD):
                await talk.answer(await asked.get())
        self.flood.injected += 1

    async def _never_listen(self) -> None:
        _, writer = await asyncio.open_unix_connection(str(self._socket), limit=1)
        try:
            writer.write(_HALVES[-1])
            hello = {"type": "hello", "protocol": PROTOCOL_VERSION, "client_version": "test", "job": "deaf"}
            resolve = {"type": "resolve", "id": 1, "urls": [f"s3://faulty/{{00000..{SHARDS - 1:05d}}}.tar"]}
            writer.write(_frame(hello))
            for _ in range(_FLOOD):
                writer.write(_frame(resolve))
            await asyncio.sleep(self._dice.uniform(1.0, 10.0))
        finally:
            writer.transport.abort()
        self.deaf.injected += 1

    async def _open_halves(self) -> None:
        writers = []
        try:
            for number in range(_HALF_OPEN):
                _, writer = await asyncio.open_unix_connection(str(self._socket))
                writers.append(writer)
                writer.write(_HALVES[number % len(_HALVES)])
            await asyncio.sleep(self._dice.uniform(1.0, 5.0))
        finally:
            for writer in writers:
                writer.transport.abort()
        self.half_open.injected += len(writers)

    async def _give_up_warming(self) -> None:
        first = self._dice.randrange(SHARDS - 20)
        await self._ask("POST", "/v1/warm", {"urls": [url(first + nth) for nth in range(20)]}, lines=3)
        self.warm.injected += 1

    async def _evict(self) -> None:
        digits = self._dice.randrange(100)
        answer = json.loads(await self._ask("POST", "/v1/evict", {"urls": [f"s3://faulty/*{digits:02d}.tar"]}))
        self.evict.injected += len(answer["evicted"])

    async def _ask(self, method: str, path: str, body: Any = None, *, lines: int | None = None) -> bytes:
        """Return an answer, or only its first lines: the connection breaks off then."""
        connector = aiohttp.UnixConnector(str(self._socket))
        async with aiohttp.ClientSession(connector=connector, raise_for_status=True) as client:
            answer = await client.request(method, f"http://daemon{path}", json=body)
            try:
                if lines is None:
                    return await answer.read()
                return b"".join([await answer.content.readline() for _ in range(lines)])
            finally:
                answer.close()


def _frame(message: dict[str, Any]) -> bytes:
    """Return a text frame as a client sends it, see RFC 6455; a mask of zeros changes nothing."""
    payload = json.dumps(message).encode()
    head = bytes([0x81, 0x80 | len(payload)]) if len(payload) < 126 else b""
    assert head, "only short messages"
    return head + bytes(4) + payload
