"""Shares of the line to the stores, seen from the stores' end."""

import asyncio
import contextlib
import re
import socket
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web

from shardcache.fetch.limits.origin_states import OriginLoad
from shardcache.fetch.limits.slot_claims import WAITING, Priority
from support.programs.downloads import PART, Rig
from support.stores import aws_env
from support.stores.buckets import use_aws

MIB = 1024 * 1024
# More than the kernels of both sides hold back while nobody reads.
LARGE = 32 * MIB
BLOCK_BYTES = MIB  # of a body, read at a time
CHUNK = bytes(64 * 1024)


@dataclass(slots=True)
class GaugedS3:
    """A store of zeros that knows what it could send.

    Attributes:
        pauses: keys whose answers stop after so many bytes of the body, until `go_on`.
    """

    sizes: dict[str, int] = field(default_factory=dict)  # of the objects, by key
    pauses: dict[str, int] = field(default_factory=dict)
    capacity: int | None = (
        None  # requests at a time; more are refused with 503 SlowDown. None takes all
    )
    requests: list[tuple[str, int]] = field(default_factory=list)  # (key, first byte) of every GET
    refused: int = 0  # how many of them were
    # Of bodies, by key, as far as the kernel took them.
    sent_bytes: Counter[str] = field(default_factory=Counter)
    at_once: int = 0  # requests that are being answered now; `most_at_once` ever
    most_at_once: int = 0
    _gates: dict[str, asyncio.Event] = field(default_factory=lambda: defaultdict(asyncio.Event))
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, key: str, size_bytes: int, *, pause_after: int | None = None) -> str:
        """Make an object of zeros; return its s3:// url."""
        self.sizes[key] = size_bytes
        if pause_after is not None:
            self.pauses[key] = pause_after
        return f"s3://gauged/{key}"

    def go_on(self, key: str) -> None:
        """Let the answers continue that were stopped by now."""
        self._gates.pop(key, asyncio.Event()).set()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()

    def _note(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        key = request.match_info["key"]
        size = self.sizes[key]
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", ""))
        start = int(match[1]) if match else 0
        stop = min(int(match[2]) + 1, size) if match else size
        answer = web.StreamResponse(status=206 if match else 200, headers={"ETag": f'"{size}"'})
        answer.content_length = stop - start
        if match:
            answer.headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        if request.method == "HEAD":
            return answer
        self.requests.append((key, start))
        if self.capacity is not None and self.at_once >= self.capacity:
            self.refused += 1
            self._note()
            return web.Response(
                status=503,
                text="<Error><Code>SlowDown</Code></Error>",
                content_type="application/xml",
            )
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self._note()
        with contextlib.suppress(ConnectionError):  # the client went away
            await self._send(request, answer, key, stop - start, self._gates[key])
        self.at_once -= 1
        self._note()
        return answer

    async def _send(
        self,
        request: web.Request,
        answer: web.StreamResponse,
        key: str,
        size_bytes: int,
        gate: asyncio.Event,
    ) -> None:
        assert request.transport is not None
        # Little room in the kernel: what the client does not read shall soon stop the sender.
        request.transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDBUF, len(CHUNK)
        )
        await answer.prepare(request)
        pause_after = self.pauses.get(key, size_bytes)
        sent = 0
        while sent < size_bytes:
            if sent == pause_after:
                await gate.wait()
            count = min(len(CHUNK), (pause_after if sent < pause_after else size_bytes) - sent)
            await answer.write(CHUNK[:count])
            sent += count
            self.sent_bytes[key] += count
            self._note()


@pytest.fixture
async def gauged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[GaugedS3]:
    """A server that knows what it could send; this process's AWS variables point at it."""
    store = GaugedS3()
    app = web.Application()
    app.router.add_route("*", "/gauged/{key:.+}", store.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    use_aws(monkeypatch, tmp_path, aws_env(f"http://127.0.0.1:{runner.addresses[0][1]}"))
    yield store
    for key in list(store.sizes):
        store.go_on(key)
    await runner.cleanup()


async def reached(condition: Callable[[], bool]) -> None:
    """Let everything run until a state is reached that no server tells of."""
    while not condition():  # noqa: ASYNC110 - nobody could set an event
        await asyncio.sleep(0)


async def test_a_paused_part_stops_its_sender_and_loses_nothing(rig: Rig, gauged: GaugedS3) -> None:
    """The other reader's bytes stay in the store while a waiting part has the only slot."""
    rig.downloader = rig.make(max_connections=1)
    planned, waiting = [await rig.stat(gauged.put(key, LARGE)) for key in ("planned", "waiting")]
    gauged.pauses |= {"planned": MIB, "waiting": 0}
    gauged.requests.clear()
    came_bytes: list[int] = []

    def note(done_bytes: int) -> None:
        came_bytes.append(rig.counters.origin_bytes)
        assert gauged.sent_bytes["planned"] < LARGE

    async with asyncio.TaskGroup() as group:
        paused = group.create_task(rig.download(planned, part_bytes=LARGE))
        await gauged.until(lambda: gauged.sent_bytes["planned"] >= MIB)
        group.create_task(rig.download(waiting, Priority(WAITING), part_bytes=LARGE, progress=note))
        await gauged.until(lambda: ("waiting", 0) in gauged.requests)
        gauged.go_on("planned")
        gauged.go_on("waiting")
    # A block that was being awaited when the part was paused still comes.
    assert came_bytes[-1] - LARGE <= MIB + BLOCK_BYTES
    assert paused.result().missing() == []
    assert gauged.requests == [("planned", 0), ("waiting", 0)]
    assert rig.counters.origin_bytes == 2 * LARGE
    assert rig.counters.retries == 0
    assert rig.downloader.scheduler.pauses == 1


async def test_a_busy_store_gets_fewer_requests_until_it_takes_more(
    rig: Rig, gauged: GaugedS3
) -> None:
    """503 SlowDown lowers concurrency below what the store takes; success restores it."""
    rig.downloader = rig.make(max_connections=8, shard_connections=8, attempts=10)
    obj = await rig.stat(gauged.put("a.tar", 200 * PART, pause_after=0))
    gauged.capacity = 3
    async with asyncio.TaskGroup() as group:
        group.create_task(rig.download(obj))
        # Eight at once were five too many; then four, of which three are under way, one too many:
        # it keeps to two.
        await reached(
            lambda: (
                rig.downloader.scheduler.loads()
                == [OriginLoad("s3://gauged", connections=3, limit=2, throttled=2)]
            )
        )
        assert gauged.refused == 6
        gauged.capacity = None
        gauged.most_at_once = 0
        while gauged.most_at_once < 8:
            await gauged.until(lambda: gauged.at_once >= rig.downloader.scheduler.loads()[0].limit)
            assert gauged.at_once <= max(3, rig.downloader.scheduler.loads()[0].limit)
            gauged.go_on("a.tar")
            await gauged.until(lambda: gauged.at_once == 0)
        gauged.pauses.clear()
        gauged.go_on("a.tar")
    assert gauged.refused == 6


@pytest.mark.slow
async def test_bandwidth_is_kept_all_along(rig: Rig, gauged: GaugedS3) -> None:
    """The bytes never exceed the rate, except for a burst and what the kernel holds."""
    rate = 4 * MIB
    size = 6 * MIB
    rig.downloader = rig.make(max_bandwidth=rate)
    obj = await rig.stat(gauged.put("a.tar", size))
    loop = asyncio.get_running_loop()
    seen = [(0.0, 0)]
    began_s = loop.time()

    def note(done_bytes: int) -> None:
        seen.append((loop.time() - began_s, done_bytes))

    await rig.download(obj, part_bytes=MIB, progress=note)
    assert seen[-1][1] == size
    for elapsed_s, done_bytes in seen:
        assert done_bytes <= rate * (elapsed_s + 0.1) + MIB
