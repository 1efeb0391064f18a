"""Retries: of requests, with backoff, and of objects that were replaced or arrived corrupt."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from shardcache.errors import CorruptShardError, OriginError, OriginUnavailableError, ShardChangedError
from shardcache.logs import SharedLogger
from shardcache.metrics import Counters
from shardcache.redact import redact

log = SharedLogger()

P = ParamSpec("P")
T = TypeVar("T")

# Attempts for an object that is overwritten during the download. If it is rewritten faster than it can be downloaded,
# the error goes to the reader.
_VERSIONS = 3


@dataclass(frozen=True, slots=True)
class Backoff:
    """Full-jitter exponential backoff: a random time below a bound that doubles with each failure.

    After M. Brooker, "Exponential Backoff and Jitter", AWS Architecture Blog, 2015: while many clients contend, full
    jitter needs the fewest calls of the variants compared there.
    """

    base_s: float = 0.25
    cap_s: float = 15.0

    def bound_s(self, failures: int) -> float:
        """Return the longest pause after a number of failures (1 or more)."""
        return min(self.cap_s, self.base_s * 2.0 ** min(failures - 1, 64))

    def pause_s(self, failures: int, uniform: float) -> float:
        """Return the pause for a random number from [0, 1)."""
        return self.bound_s(failures) * uniform


BACKOFF = Backoff()


@dataclass(frozen=True, slots=True, order=True)
class FailedAttempt:
    """A failed attempt at a request that will be repeated; its text is for people."""

    number: int
    attempts: int
    cause: str

    def __str__(self) -> str:
        return f"attempt {self.number} of {self.attempts}: {self.cause}"


@dataclass(frozen=True, slots=True)
class Retry:
    """Retry policy for requests to origins.

    Attributes:
        attempts: maximum number of attempts, the first included.
        counters: count retries and requests given up.
        failing: latest failed attempt at requests under way, by url.
    """

    attempts: int
    counters: Counters
    backoff: Backoff = BACKOFF
    failing: dict[str, FailedAttempt] = field(default_factory=dict)

    async def call(self, url: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return what `attempt` returns, which requests something of `url`.

        Retries only after OriginUnavailableError: any other error would recur. Raises the last attempt's error, with
        the number of attempts.
        """
        try:
            return await self._call(url, attempt)
        except OriginError as exn:
            self.counters.measures.given_up[exn.code] += 1
            raise
        finally:
            self.failing.pop(url, None)

    async def _call(self, url: str, attempt: Callable[[], Awaitable[T]]) -> T:
        for failures in range(1, self.attempts):
            try:
                return await attempt()
            except OriginUnavailableError as exn:
                self.counters.retries += 1
                self._failed(url, FailedAttempt(failures, self.attempts, exn.message))
            await asyncio.sleep(self.backoff.pause_s(failures, random.random()))
        try:
            return await attempt()
        except OriginUnavailableError as exn:
            message = f"{exn.message} (given up after {self.attempts} attempts)"
            raise type(exn)(message, url=exn.url, remedy=exn.remedy) from exn

    def _failed(self, url: str, failed: FailedAttempt) -> None:
        self.failing[url] = failed
        if failed.number > 1 and failed.number.bit_count() == 1:  # the 2nd, 4th, 8th: not every lost connection
            log.warning("request failed; retrying", url=redact(url), cause=str(failed))


def refetch(fetch: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Decorate a function that fetches an object: repeat it if the object was replaced, and once if it is corrupt."""

    @wraps(fetch)
    async def refetching(*args: P.args, **kwargs: P.kwargs) -> T:
        corrupt = False
        for _ in range(_VERSIONS - 1):
            try:
                return await fetch(*args, **kwargs)
            except ShardChangedError:
                pass
            except CorruptShardError:
                # A retry cures a bit flipped in transit; an object damaged at the origin fails again.
                if corrupt:
                    raise
                corrupt = True
        return await fetch(*args, **kwargs)

    return refetching
