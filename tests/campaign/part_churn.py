"""Many readers of ranges in a cache of few parts, while objects are replaced, evicted and verified.

Every range that is granted has the bytes of the version that the grant names; what is not granted
is an error that says why. At any time the cache takes no more of the disk than it may.
"""

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from campaign.harness import Result, Row, scaled
from campaign.kill_audit import bookkeeping
from campaign.lives import GONE
from campaign.range_reads import granted_bytes
from support.programs.daemon import Daemon, eventually
from support.programs.guard import GUARD_S
from support.programs.raw_session import RawSession
from support.stores.canary import Canary

PART_BYTES = 64 * 1024
OBJECTS = 8
PARTS = 12  # of an object, the last one short
SIZE_BYTES = PARTS * PART_BYTES - 1000
CACHED = 28  # parts that fit: an eighth of them is for ranges that are asked for ahead
CAPACITY_BYTES = CACHED * PART_BYTES
FLAGS = (
    "--part-size",
    str(PART_BYTES),
    "--range-part-size",
    str(PART_BYTES),
    "--listing-ttl-s",
    "0",
    "--log-level",
    "error",
)
_READERS = 10
_RANGES = 30_000  # at scale 1, of all readers
_KILLS = 80
_FEWEST_RANGES = 120
_REPLACED_EVERY = 40  # ranges, on average
_LOOKED_AFTER_EVERY = 25
_MOST_PARTS = 3  # of a range
_PAUSE_S = 0.01
_TRIES = 5
# A reader that names no version may be told that the object was replaced meanwhile.
_EXPECTED = {"shard_changed", "outdated"}


class Objects:
    """Objects of a store that are replaced while they are read.

    Attributes:
        urls: of the objects.
        bodies: the bytes of every version that there has ever been.
    """

    def __init__(self, store: Canary) -> None:
        self._store = store
        self._edition = 0
        self.bodies: dict[str, bytes] = {}
        self.urls = [self.replace(number) for number in range(OBJECTS)]

    def replace(self, number: int) -> str:
        """Store other bytes, as many as before; return the object's url."""
        self._edition += 1
        body = random.Random(self._edition).randbytes(SIZE_BYTES)
        self.bodies[f'"{hash(body)}"'] = body
        return self._store.put(f"{number}.bin", body)


class Wanted(NamedTuple):
    """A range of the object with a number."""

    number: int
    start: int
    end: int


@dataclass(slots=True)
class Churn:
    """Readers of a daemon, each in a thread, and what disturbs them.

    Attributes:
        ranges: how many they read together.
        kills: how often the daemon is killed meanwhile.
    """

    daemon: Daemon
    objects: Objects
    result: Result
    ranges: int
    kills: int = 0
    _read: int = 0
    _is_over: threading.Event = field(default_factory=threading.Event)
    _counting: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> None:
        """Read all ranges, and count what is not right."""
        with ThreadPoolExecutor(_READERS + 2) as pool:
            readers = [pool.submit(self._live, number) for number in range(_READERS)]
            watch = pool.submit(self._watch)
            try:
                self._disturb(readers)
            finally:
                self._is_over.set()
            for each in (*readers, watch):
                each.result()

    def _disturb(self, readers: list[Future[None]]) -> None:
        """Replace objects, look after the cache and kill the daemon, as the readers read on."""
        rng = random.Random(self.ranges)
        kills = [(number + 1) * self.ranges // (self.kills + 1) for number in range(self.kills)]
        replaced = looked_after = 0
        while self._read < self.ranges:
            if any(reader.done() for reader in readers):
                return  # it has failed, and says so
            if kills and self._read >= kills[0]:
                kills.pop(0)
                self.daemon.restart()
                self.result.injected += 1
            if self._read > replaced:
                self.objects.replace(rng.randrange(OBJECTS))
                replaced = self._read + rng.randrange(2 * _REPLACED_EVERY)
            if self._read > looked_after:
                self._look_after(rng)
                looked_after = self._read + rng.randrange(2 * _LOOKED_AFTER_EVERY)
            time.sleep(_PAUSE_S)

    def _look_after(self, rng: random.Random) -> None:
        """Evict an object, or verify all."""
        if rng.random() < 0.5:
            self.daemon.request("POST", "/v1/evict", {"urls": [rng.choice(self.objects.urls)]})
        else:
            self.daemon.request("POST", "/v1/verify", {"prefix": ""})

    def _watch(self) -> None:
        """See that the cache never takes more than it may, by its own word or on the disk."""
        while not self._is_over.wait(5 * _PAUSE_S):
            on_disk_bytes = 0
            for path in self.daemon.cache_dir.glob("partial/*"):
                with suppress(FileNotFoundError):
                    on_disk_bytes += path.stat().st_blocks * 512
            if on_disk_bytes > CAPACITY_BYTES:
                self.result.fail("wrong", f"{on_disk_bytes} bytes of {CAPACITY_BYTES} on the disk")

    def _live(self, number: int) -> None:
        """Join, read ranges, leave without a word and join again."""
        rng = random.Random(number)
        while not self._is_over.is_set():
            try:
                with RawSession(self.daemon, job=f"reader-{number}") as session:
                    self._read_some(session, rng)
            except TimeoutError as exn:
                self.result.fail("hangs", f"a range did not come: {exn!r}")
                return
            except (*GONE, AssertionError) as exn:
                if not self.kills:
                    self.result.fail("untyped", f"a session ended: {exn!r}")
                    return
                self._is_over.wait(_PAUSE_S)  # until the next daemon serves

    def _read_some(self, session: RawSession, rng: random.Random) -> None:
        """Ask for ranges ahead, and read them in order, each released before the next is needed."""
        session.plan(self.objects.urls, list(range(OBJECTS)), wanted="ranges")
        for _ in range(rng.randrange(1, 12)):
            asked = [self._ask(session, self._choose(rng)) for _ in range(rng.randrange(1, 6))]
            for request, wanted in asked:
                session.send(type="need", of=request)
                self._read_one(session, request, wanted)
                if self._is_over.is_set():
                    return
        if rng.random() < 0.3:
            self._ask(session, self._choose(rng))  # it leaves with this one

    def _choose(self, rng: random.Random) -> Wanted:
        start = rng.randrange(SIZE_BYTES - 1000)
        most_bytes = (_MOST_PARTS - 1) * PART_BYTES
        end = min(start + rng.randrange(1, most_bytes), SIZE_BYTES)
        return Wanted(rng.randrange(OBJECTS), start, end)

    def _ask(self, session: RawSession, wanted: Wanted, **fields: Any) -> tuple[int, Wanted]:
        """Ask for a range; return the number of the request, too."""
        span = {"start": wanted.start, "beyond": wanted.end - 1, "partial": True}
        return session.request("lease", position=wanted.number, **span, **fields), wanted

    def _read_one(self, session: RawSession, request: int, wanted: Wanted) -> None:
        """Read a range, compare it and release it.

        Between grant and look, the granted file may have become the whole object's, which may have
        been evicted; there may be a new file of parts by then. The range is then asked for again,
        as clients do.
        """
        with self._counting:
            self._read += 1
        for _ in range(_TRIES):
            grant = session.answer(request)
            if grant["type"] == "error":
                if grant["error"]["code"] not in _EXPECTED:
                    self.result.fail("lost", f"a range was refused: {grant['error']}")
                return
            is_there = self._compare(grant, wanted)
            session.send(type="release", lease=grant["lease"], read=is_there)
            if is_there:
                return
            request, _ = self._ask(session, wanted, needed=True)
        self.result.fail("lost", f"the file of {_TRIES} grants was not there: {grant}")

    def _compare(self, grant: dict[str, Any], wanted: Wanted) -> bool:
        """Compare a granted range; return whether its file is there."""
        right = self.objects.bodies[grant["version"]][wanted.start : wanted.end]
        try:
            found = granted_bytes(grant, wanted.start, wanted.end)
        except FileNotFoundError:
            return False
        if found != right:
            self.result.fail("wrong", f"other bytes than those of {grant['version']}: {grant}")
        return True


@contextmanager
def ground(folder: Path, _scale: float) -> Iterator[tuple[Canary, Path]]:
    """Prepare a store."""
    with Canary() as store:
        yield store, folder


def churned(kills: int, field: tuple[Canary, Path], result: Result, scale: float) -> None:
    """Read ranges in a cache of few parts.

    Args:
        kills: how often the daemon is killed meanwhile, at scale 1.
    """
    store, folder = field
    root = folder / f"churn-{kills}"
    root.mkdir()
    times = scaled(kills, scale, 2) if kills else 0
    with Daemon(root, *FLAGS, capacity=str(CAPACITY_BYTES)) as daemon:
        ranges = scaled(_RANGES, scale, _FEWEST_RANGES)
        Churn(daemon, Objects(store), result, ranges, times).run()
        try:
            eventually(lambda: _is_quiet(daemon), limit_s=GUARD_S)
        except TimeoutError:
            result.fail("hangs", f"transfers without readers: {daemon.status()['transfers']}")
        for kind, problem in bookkeeping(daemon, "in the end"):
            result.fail(kind, problem)
        if not kills:
            result.injected = daemon.status()["counters"]["evictions"]
    if "Traceback" in daemon.log.read_text():
        result.fail("untyped", f"a bug shows in the log: {daemon.tail()}")


def _is_quiet(daemon: Daemon) -> bool:
    return not (daemon.sessions() or daemon.status()["transfers"])


ROWS = (
    Row("evictions of parts, under many readers", partial(churned, 0)),
    Row("the same, and SIGKILL", partial(churned, _KILLS)),
)
