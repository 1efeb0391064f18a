"""Fifty-six readers of ten thousand shards in a cache for some hundred, for ten minutes in which
nothing is spared.

Run as a program it is their store, which breaks a share of its answers: each line of its input is
that share from then on, and the answer to it how many it has broken so far.
"""

import asyncio
import contextlib
import json
import logging
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from campaign.harness import Result, Row
from shardcache.shared.protocol import SESSION_PATH
from shardcache_client.daemon.websocket import HandshakeError
from support.network.http_requests import Request
from support.programs.daemon import Daemon, UnixConnection, eventually
from support.programs.raw_session import RawSession
from support.shards.tars import make_tar, random_samples
from support.stores import aws_env
from support.stores.faulty_s3 import BUCKET, FaultyS3
from support.stores.mischief import Mischief
from support.stores.spoiling_server import Rule

SHARDS = 10_000
_BROKEN_SHARE = 0.05
_QUIET_S = 120.0
# On a machine that does other things, some trouble may be longer in coming; longer than all tries
# for one shard.
_PATIENCE_S = 120.0
_SLACK_BYTES = 48 * 1024 * 1024  # what the allocator keeps of memory that is free again
_THREADS = 48  # the daemon's pool of 32, one for the catalogue, and what libraries run
_CONNECTIONS = 32  # --max-connections, by each of the two ways to S3
_FLAGS = ("--stall-timeout-s", "2", "--log-level", "error", "--max-transfers", "8")
_FLOOD = 500
_PIECE = 4_096
_HALVES = (
    b"",
    b"GET /v1/status HTTP/1.1\r\nHost: da",
    b"POST /v1/evict HTTP/1.1\r\nHost: daemon\r\nContent-Length: 1000\r\n\r\n{",
    f"GET {SESSION_PATH} HTTP/1.1\r\nHost: daemon\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode(),
)


def url(number: int) -> str:
    return f"s3://{BUCKET}/{number:05d}.tar"


@lru_cache(maxsize=2_048)
def body(number: int) -> bytes:
    return make_tar(random_samples(3, {"bin": 2_000}, first=number * 3))


class _Shards(Mapping[str, bytes]):
    """All shards by their keys, made when they are asked for."""

    def __getitem__(self, key: str) -> bytes:
        return body(int(key.removesuffix(".tar")))

    def __iter__(self) -> Iterator[str]:
        return (f"{number:05d}.tar" for number in range(SHARDS))

    def __len__(self) -> int:
        return SHARDS


class MoodyS3(FaultyS3):
    """Breaks a share of its answers, in every way that a retry mends."""

    share = 0.0
    broken = 0
    dice = random.Random(0)

    def rules_for(self, request: Request) -> list[Rule]:
        if self.dice.random() >= self.share:
            return []
        self.broken += 1
        kinds = [Mischief.SLOW_DOWN, Mischief.INTERNAL_ERROR, Mischief.SILENCE]
        if request.method == "GET":
            kinds += [
                Mischief.STALL,
                Mischief.RESET,
                Mischief.TRUNCATE,
                Mischief.RANGE_SHIFTED,
                Mischief.WHOLE,
            ]
            kinds += [Mischief.ETAG_OTHER, Mischief.FLIP]
        return [Rule(self.dice.choice(kinds))]


async def _serve() -> None:
    logging.disable()  # who was cut off is no news here
    async with MoodyS3() as store:
        store.objects = _Shards()  # type: ignore[assignment]
        store.crc32c = True
        print(store.endpoint_url, flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            store.share = float(line)
            print(store.broken, flush=True)


@contextlib.contextmanager
def _store() -> Iterator[tuple[str, Callable[[float], int]]]:
    """Run the store; yield its address, and how to set the share of its answers that it breaks."""
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-m", "campaign.load"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, text=True, bufsize=1, env=env, stdin=pipe, stdout=pipe
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        reading = process.stdout
        writing = process.stdin

        def break_share(share: float) -> int:
            writing.write(f"{share}\n")
            return int(reading.readline())

        yield reading.readline().strip(), break_share
        writing.close()


class Load:
    """All that goes on around a daemon, each in a thread of its own, until it has lasted long
    enough.

    Args:
        share: of the full load; never so little that nothing would meet anything.
    """

    def __init__(self, daemon: Daemon, share: float) -> None:
        self._daemon = daemon
        self._share = min(1.0, share)
        self._dice = random.Random(0)
        self._over = threading.Event()
        crowd = max(10, round(self._share * 56))
        troubles = (
            (f"flood of {_FLOOD} requests", self._send_flood, 7.0),
            (f"{_FLOOD} requests of a reader that never listens", self._never_listen, 9.0),
            ("connection left half open", self._open_halves, 8.0),
            ("warm given up", self._give_up_warming, 5.0),
            ("shard evicted on demand", self._evict, 2.0),
        )
        self.torn = Result(f"sessions of {crowd} readers torn off in mid-read")
        self._tasks: list[Callable[[], None]] = [
            partial(self._live, random.Random(seed), f"crowd-{seed % 8}") for seed in range(crowd)
        ]
        self.results = [self.torn]
        for fault, act, pause_s in troubles:
            self.results.append(Result(fault))
            self._tasks.append(partial(self._again_and_again, self.results[-1], act, pause_s))

    def bear(self, duration_s: float) -> list[Result]:
        """Have everybody read for some time, until everything has gone wrong at least once."""
        with ThreadPoolExecutor(len(self._tasks)) as pool:
            done = [pool.submit(task) for task in self._tasks]
            self._over.wait(max(duration_s / 60, duration_s * self._share))
            with contextlib.suppress(TimeoutError):
                eventually(lambda: all(each.injected for each in self.results), limit_s=_PATIENCE_S)
            self._over.set()
            for each in done:
                each.result()
        return self.results

    def _live(self, dice: random.Random, job: str) -> None:
        """Join, read for a while, leave without a word and join again."""
        while not self._over.is_set():
            try:
                with RawSession(self._daemon, job) as session:
                    self._read_some(session, dice)
                self.torn.injected += 1
            except TimeoutError:
                self.torn.fail("hangs", f"{job}: a request was not answered")
            except (OSError, HandshakeError, AssertionError) as exn:
                self.torn.fail("untyped", f"{job}: {exn!r}")

    def _read_some(self, session: RawSession, dice: random.Random) -> None:
        numbers = dice.sample(range(SHARDS), dice.choice((20, 200, SHARDS)))
        order = list(range(len(numbers)))
        session.plan(list(map(url, numbers)), order[:_PIECE], len(numbers))
        for first in range(_PIECE, len(numbers), _PIECE):
            session.ask("extend", order=order[first : first + _PIECE])
        ahead = session.request("lease", position=0)
        for position in range(min(dice.randrange(1, 40), len(numbers) - 1)):
            asked = ahead
            ahead = session.request("lease", position=position + 1)
            session.send(type="need", of=asked)
            self._check(session.answer(asked), numbers[position])
            if self._over.wait(0.2 * dice.random()):
                return
            session.send(type="release", lease=asked)

    def _check(self, answer: dict[str, Any], number: int) -> None:
        if answer["type"] == "error":
            if answer["error"].get("code") in (None, "error"):
                self.torn.fail("untyped", str(answer))
            return
        with contextlib.suppress(
            FileNotFoundError
        ):  # it went between grant and need, and is asked for again
            if Path(answer["path"]).read_bytes() != body(number):
                self.torn.fail("wrong", f"{answer} is not what the store holds")

    def _again_and_again(
        self, result: Result, act: Callable[[Result], None], pause_s: float
    ) -> None:
        while not self._over.wait(pause_s * self._dice.uniform(0.5, 1.5)):
            try:
                act(result)
            except TimeoutError as exn:
                result.fail("hangs", f"{result.fault}: {exn}")

    def _send_flood(self, result: Result) -> None:
        with RawSession(self._daemon, "flood") as session:
            requests = [session.request("explain", of=0) for _ in range(_FLOOD)]
            for request in requests:
                session.answer(request)
        result.injected += 1

    def _never_listen(self, result: Result) -> None:
        with RawSession(self._daemon, "deaf") as session:
            # The daemon takes no more of them than it can answer: a thread sends for as long as it
            # is let.
            resolve = {
                "type": "resolve",
                "id": 1,
                "urls": [f"s3://{BUCKET}/{{00000..{SHARDS - 1:05d}}}.tar"],
            }
            sending = threading.Thread(target=_send_all, args=(session, resolve))
            sending.start()
            self._over.wait(self._dice.uniform(1.0, 10.0))
            session.hang_up()
            sending.join()
        result.injected += 1

    def _open_halves(self, result: Result) -> None:
        with contextlib.ExitStack() as stack:
            for number in range(50):
                sock = stack.enter_context(socket.socket(socket.AF_UNIX))
                sock.connect(str(self._daemon.socket))
                sock.sendall(_HALVES[number % len(_HALVES)])
            self._over.wait(self._dice.uniform(1.0, 5.0))
        result.injected += 50

    def _give_up_warming(self, result: Result) -> None:
        first = self._dice.randrange(SHARDS - 20)
        with contextlib.closing(UnixConnection(self._daemon.socket)) as connection:
            urls = [url(first + nth) for nth in range(20)]
            connection.request("POST", "/v1/warm", json.dumps({"urls": urls}))
            with connection.getresponse() as answer:
                for _ in range(3):
                    answer.readline()
        result.injected += 1

    def _evict(self, result: Result) -> None:
        pattern = f"s3://{BUCKET}/*{self._dice.randrange(100):02d}.tar"
        answer = json.loads(self._daemon.request("POST", "/v1/evict", {"urls": [pattern]}))
        result.injected += len(answer["evicted"])


def _send_all(session: RawSession, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        for _ in range(_FLOOD):
            session.send(**message)


@contextlib.contextmanager
def ground(folder: Path, scale: float) -> Iterator[list[Result]]:
    """Load a daemon for ten minutes or less: what came of each trouble, and what is left."""
    with (
        _store() as (endpoint_url, break_share),
        Daemon(folder, *_FLAGS, capacity="16MB", env=aws_env(endpoint_url)) as daemon,
    ):
        Load(daemon, scale).bear(
            60.0
        )  # with a store that is well, until the daemon has what it keeps for good
        eventually(lambda: is_quiet(daemon), limit_s=_QUIET_S)
        before = daemon.status()["process"]
        break_share(_BROKEN_SHARE)
        results = Load(daemon, scale).bear(600.0)
        broken = Result("answer of the store broken", injected=break_share(0.0))
        left = _nothing_left(results[0].injected, before, daemon)
    yield [broken, *results, left]


def _take(number: int, results: list[Result], result: Result, _scale: float) -> None:
    for each in fields(Result):
        setattr(result, each.name, getattr(results[number], each.name))


def _nothing_left(sessions: int, before: dict[str, int], daemon: Daemon) -> Result:
    left = Result("sessions that came and went: nothing is left", injected=sessions)
    begun_s = time.monotonic()
    try:
        eventually(lambda: is_quiet(daemon), limit_s=_QUIET_S)
        left.recovery_s.append(time.monotonic() - begun_s)
        eventually(
            lambda: has_not_grown(daemon, before)
        )  # files are open for a moment whatever it does
    except TimeoutError:
        left.fail("hangs", f"before: {before}; after: {daemon.status()}")
    rss_bytes = daemon.status()["process"]["rss_bytes"]
    left.fault += f" ({before['rss_bytes'] / 1e6:.0f} → {rss_bytes / 1e6:.0f} MB)"
    if rss_bytes > before["rss_bytes"] + _SLACK_BYTES:
        left.fail("hangs", f"memory does not come back: {before}; {daemon.status()['process']}")
    # What no shard is does not count: the catalogue may grow by what it remembers of each url.
    kept = (
        path
        for name in ("shards", "partial", "quarantine")
        for path in (daemon.cache_dir / name).rglob("*")
    )
    used_bytes = daemon.status()["cache"]["used_bytes"]
    found_bytes = sum(path.stat().st_size for path in kept if path.is_file())
    if used_bytes != found_bytes:
        left.fail("wrong", f"{used_bytes} bytes are said to be used, {found_bytes} are")
    return left


def has_not_grown(daemon: Daemon, before: dict[str, int]) -> bool:
    """True if the process has no more than before, except threads and connections for reuse."""
    now = daemon.status()["process"]
    is_bounded = now["threads"] <= _THREADS and now["fds"] <= before["fds"] + _CONNECTIONS
    return is_bounded and int(now["tasks"]) <= before["tasks"]


def is_quiet(daemon: Daemon) -> bool:
    """True without sessions, transfers, promises and leases."""
    status = daemon.status()
    cache = status["cache"]
    return not (
        daemon.sessions() or status["transfers"] or cache["reserved_bytes"] or cache["leased_bytes"]
    )


_ROWS = (
    "broken answers",
    "torn sessions",
    "flood",
    "deaf readers",
    "half-open connections",
    "warm given up",
    "evictions",
    "nothing is left",
)
ROWS = tuple(Row(name, partial(_take, number), slow=True) for number, name in enumerate(_ROWS))

if __name__ == "__main__":
    asyncio.run(_serve())
