"""Repetition of requests that failed, and of fetches whose object was replaced or is corrupt.

The `Downloader` sends each request to an origin through `Retry.call`, which repeats the request
after a pause. A fetch of a whole shard is decorated with `refetch`, which begins the fetch again if
the object changed in the middle.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from shardcache.shared.exceptions import (
    CorruptShardError,
    OriginError,
    OriginUnavailableError,
    ShardChangedError,
)
from shardcache.shared.wording.redact import redact
from shardcache.telemetry.logs import SharedLogger
from shardcache.telemetry.metrics import Counters

log = SharedLogger()

P = ParamSpec("P")
T = TypeVar("T")

# Maximum number of fetches of an object that is overwritten during the download. If the object is
# rewritten faster than it can be downloaded, the error goes to the reader.
_MAX_FETCHES = 3
_MAX_RETRY_AFTER_S = 60  # longest pause that a server can request
# The power of two below would overflow after 1,023 doublings. Far fewer are enough for any cap.
_MAX_DOUBLINGS = 64


@dataclass(frozen=True, slots=True)
class Backoff:
    """Full-jitter exponential backoff.

    The pause is a random time below a bound, which doubles with each failure. The method is from
    M. Brooker, "Exponential Backoff and Jitter", AWS Architecture Blog, 2015. Of the variants
    compared there, full jitter needs the fewest calls while many clients contend.

    Attributes:
        base_s: the first bound.
        cap_s: the highest bound.
    """

    base_s: float = 0.25
    cap_s: float = 15.0

    def pause_s(self, failures: int, uniform: float) -> float:
        """Return the pause after a number of failures in a row.

        Args:
            failures: the number of failures, 1 or more.
            uniform: a random number from [0, 1).
        """
        doublings = min(failures - 1, _MAX_DOUBLINGS)
        bound_s = min(self.cap_s, self.base_s * 2.0**doublings)
        return bound_s * uniform


BACKOFF = Backoff()


@dataclass(frozen=True, slots=True, order=True)
class FailedAttempt:
    """A failed attempt at a request that will be repeated; `str` gives a text for people.

    The greatest of several failed attempts is the one with the highest number.

    Attributes:
        number: number of the attempt, from 1.
        max_attempts: maximum number of attempts at the request.
        cause: message of the error.
    """

    number: int
    max_attempts: int
    cause: str

    def __str__(self) -> str:
        return f"attempt {self.number} of {self.max_attempts}: {self.cause}"


@dataclass(frozen=True, slots=True)
class Retry:
    """Retry policy for requests to origins.

    Attributes:
        max_attempts: maximum number of attempts at a request, including the first.
        counters: the daemon's statistics.
        backoff: the pauses between attempts.
        failing: the requests that are being repeated, by url: for each of them, its last failed
            attempt. A url may have several requests, for different parts of its object. Urls
            without any are left out. What failed last comes last.
    """

    max_attempts: int
    counters: Counters
    backoff: Backoff = BACKOFF
    failing: dict[str, list[FailedAttempt]] = field(default_factory=dict)

    async def call(self, url: str, send: Callable[[], Awaitable[T]]) -> T:
        """Return the result of a request, which is repeated if it fails.

        It is repeated only after OriginUnavailableError, as any other error would recur. Raises the
        error of the last attempt, with the number of attempts in its message.

        Args:
            url: the url that the request is about.
            send: sends the request once.
        """
        number = 1
        last_failed: FailedAttempt | None = None
        try:
            while True:
                try:
                    return await send()
                except OriginUnavailableError as exn:
                    if number == self.max_attempts:
                        raise _given_up(exn, number) from exn
                    failed = FailedAttempt(number, self.max_attempts, exn.message)
                    self._record(url, failed, previous=last_failed)
                    last_failed = failed
                    pause_s = self._pause_s(exn, number)
                await asyncio.sleep(pause_s)
                number += 1
        except OriginError as exn:
            # This counts every request without a result, whether it was repeated before or not.
            self.counters.measures.given_up[exn.code] += 1
            raise
        finally:
            self._forget(url, last_failed)

    def _pause_s(self, exn: OriginUnavailableError, failures: int) -> float:
        """Return the pause after a number of failures in a row, of which `exn` is the last."""
        retry_after_s = min(exn.retry_after_s, _MAX_RETRY_AFTER_S)
        return retry_after_s + self.backoff.pause_s(failures, random.random())

    def _record(self, url: str, failed: FailedAttempt, previous: FailedAttempt | None) -> None:
        """Count a failed attempt, replace the previous one in `failing`, and log if it is due."""
        self.counters.retries += 1
        self._forget(url, previous)
        # The url moves to the end of `failing`, also if other requests for it fail.
        others = self.failing.pop(url, [])
        self.failing[url] = [*others, failed]
        # Only the 2nd, 4th, 8th, … failure is logged: a single lost connection is not worth a line.
        is_power_of_two = failed.number.bit_count() == 1
        if failed.number > 1 and is_power_of_two:
            log.warning("request failed; retrying", url=redact(url), cause=str(failed))

    def _forget(self, url: str, failed: FailedAttempt | None) -> None:
        """Remove a failed attempt from `failing`; no-op for None.

        Failed attempts at other requests for the same url stay. They may be equal to this one, so
        attempts are compared by identity.
        """
        if failed is None:
            return
        others = [each for each in self.failing.pop(url) if each is not failed]
        if others:
            self.failing[url] = others


def _given_up(exn: OriginUnavailableError, attempts: int) -> OriginUnavailableError:
    """Return the error of the last attempt, with the number of attempts in its message."""
    message = f"{exn.message} (given up after {attempts} attempts)"
    return type(exn)(message, url=exn.url, remedy=exn.remedy)


def refetch(fetch: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Decorate a function that fetches an object, so that it is called again after some failures.

    It is called again whenever the object was replaced during the fetch, and once if the received
    object was corrupt. In total, it is called at most `_MAX_FETCHES` times.
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
                # Another fetch helps if a bit was flipped in transit. An object that is damaged at
                # the origin is corrupt again.
                if was_corrupt:
                    raise
                was_corrupt = True
        return await fetch(*args, **kwargs)  # the last attempt, whose error is raised

    return refetching
