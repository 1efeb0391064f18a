"""Repetition of requests that failed, and of fetches whose object was replaced or is corrupt."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from shardcache.errors import (
    CorruptShardError,
    OriginError,
    OriginUnavailableError,
    ShardChangedError,
)
from shardcache.redact import redact
from shardcache.telemetry.logs import SharedLogger
from shardcache.telemetry.metrics import Counters

log = SharedLogger()

P = ParamSpec("P")
T = TypeVar("T")

# Fetches of an object that is overwritten during the download. If it is rewritten faster than it
# can be downloaded, the error goes to the reader.
_MAX_FETCHES = 3
_MAX_RETRY_AFTER_S = 60
_MAX_DOUBLINGS = 64  # of the bound of a pause, which has reached any cap by then


@dataclass(frozen=True, slots=True)
class Backoff:
    """Full-jitter exponential backoff.

    The pause is a random time below a bound that doubles with each failure. After M. Brooker,
    "Exponential Backoff and Jitter", AWS Architecture Blog, 2015: while many clients contend, full
    jitter needs the fewest calls of the variants compared there.

    Attributes:
        base_s: the first bound.
        cap_s: the highest.
    """

    base_s: float = 0.25
    cap_s: float = 15.0

    def pause_s(self, failures: int, uniform: float) -> float:
        """Return the pause after a number of failures.

        Args:
            failures: 1 or more.
            uniform: a random number from [0, 1).
        """
        doublings = min(failures - 1, _MAX_DOUBLINGS)
        bound_s = min(self.cap_s, self.base_s * 2.0**doublings)
        return bound_s * uniform


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
        attempts: the most attempts at a request, the first included.
        failing: the latest failed attempt of requests under way, by url.
    """

    attempts: int
    counters: Counters
    backoff: Backoff = BACKOFF
    failing: dict[str, FailedAttempt] = field(default_factory=dict)

    async def call(self, url: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `attempt`, which sends a request for `url`.

        Retries only after OriginUnavailableError: any other error would recur. Raises the last
        attempt's error, with the number of attempts.
        """
        number = 0
        try:
            while True:
                number += 1
                try:
                    return await attempt()
                except OriginUnavailableError as exn:
                    if number == self.attempts:
                        raise _given_up(exn, number) from exn
                    self._record(url, FailedAttempt(number, self.attempts, exn.message))
                    retry_after_s = min(exn.retry_after_s, _MAX_RETRY_AFTER_S)
                pause_s = self.backoff.pause_s(number, random.random())
                await asyncio.sleep(retry_after_s + pause_s)
        except OriginError as exn:
            self.counters.measures.given_up[exn.code] += 1
            raise
        finally:
            self.failing.pop(url, None)

    def _record(self, url: str, failed: FailedAttempt) -> None:
        """Count a failed attempt, and log some of them."""
        self.counters.retries += 1
        self.failing[url] = failed
        # The 2nd, 4th, 8th: not every lost connection.
        is_power_of_two = failed.number.bit_count() == 1
        if failed.number > 1 and is_power_of_two:
            log.warning("request failed; retrying", url=redact(url), cause=str(failed))


def _given_up(exn: OriginUnavailableError, attempts: int) -> OriginUnavailableError:
    message = f"{exn.message} (given up after {attempts} attempts)"
    return type(exn)(message, url=exn.url, remedy=exn.remedy)


def refetch(fetch: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Decorate a function that fetches an object.

    It is repeated if the object was replaced, and once if it is corrupt.
    """

    @wraps(fetch)
    async def refetching(*args: P.args, **kwargs: P.kwargs) -> T:
        was_corrupt = False
        for _ in range(_MAX_FETCHES - 1):
            try:
                return await fetch(*args, **kwargs)
            except ShardChangedError:
                pass
            except CorruptShardError:
                # A retry cures a bit flipped in transit; an object damaged at the origin fails
                # again.
                if was_corrupt:
                    raise
                was_corrupt = True
        return await fetch(*args, **kwargs)  # the last attempt, whose error is raised

    return refetching
