"""Questions that every fault of the disk has to answer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import TimeoutError as TooLateError
from contextlib import contextmanager
from pathlib import Path

from campaign.result import Result
from shardcache.errors import ShardcacheError, ShardTimeoutError
from support.disks.cache_rig import LIMIT_S, CacheRig
from support.disks.shim import Shim
from support.programs.daemon import eventually


class Trial:
    """Asks a rig for shards, and counts what it should not answer."""

    def __init__(self, rig: CacheRig, result: Result) -> None:
        self._rig = rig
        self._result = result

    def ask(self, number: int, story: str) -> bool:
        """Ask for a shard; True where it came and was right, False where it failed with a typed error."""
        asked = self._rig.reading(number)
        try:
            exn = asked.exception(LIMIT_S)
        except TooLateError as late:
            exn = late
        match exn:
            case None if asked.result():
                return True
            case None:
                self._result.fail("wrong", f"{story}: other samples than were written")
            case TooLateError() | ShardTimeoutError():
                self._result.fail("hangs", f"{story}: {exn!r}")
            case ShardcacheError() if exn.url and exn.remedy:
                pass
            case _:
                self._result.fail("untyped", f"{story}: {exn!r} lacks type, url or remedy")
        return False

    def ask_cached(self, story: str) -> None:
        """Ask for the shard that is in the cache: it has to come whatever the disk does to writers."""
        if not self.ask(0, f"{story}, cached"):
            self._result.fail("lost", f"{story}: what is cached was not served")

    def recover(self, number: int, story: str) -> None:
        """Ask until it comes; then all has to be as before the fault."""
        begun_s = time.monotonic()
        while not self.ask(number, f"{story}, afterwards"):
            if time.monotonic() - begun_s > LIMIT_S:
                self._result.fail("hangs", f"{story}: no recovery; {self._rig.disk()}")
                return
            time.sleep(0.05)
        self._result.recovery_s.append(time.monotonic() - begun_s)
        self.settle(story)

    def settle(self, story: str) -> None:
        """The daemon has to say that it is well, and know what its files take."""
        try:
            eventually(lambda: self._rig.health() == "ok", limit_s=LIMIT_S)
        except TimeoutError:
            self._result.fail("hangs", f"{story}: still {self._rig.disk()}")
        told, kept = self._rig.accounts()
        if told != kept:
            self._result.fail("wrong", f"{story}: used_bytes says {told}, the files take {kept}")


@contextmanager
def rigged(result: Result, folder: Path, shim: Shim | None = None, *flags: str) -> Iterator[tuple[CacheRig, Trial]]:
    """Run a daemon that has one shard cached."""
    with CacheRig(folder, *flags, env=shim.env() if shim else None) as rig:
        trial = Trial(rig, result)
        trial.ask_cached("before any fault")
        yield rig, trial
