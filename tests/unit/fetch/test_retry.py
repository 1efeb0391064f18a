"""Retries: which errors are followed by another attempt, how many, and after which pause."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache.errors import (
    AccessDeniedError,
    CorruptShardError,
    NotFoundError,
    OriginUnavailableError,
    ShardcacheError,
    ShardChangedError,
)
from shardcache.fetch.download import Backoff, Retry, refetch
from shardcache.metrics import Counters

NO_PAUSE = Backoff(base_s=0, cap_s=0)
URL = "s3://b/a.tar"


class Script:
    """Raises what it is given, one after the other, then returns "done"."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.calls = 0

    async def __call__(self) -> str:
        """Take the next step."""
        self.calls += 1
        if self.failures:
            raise self.failures.pop(0)
        return "done"


def unavailable() -> OriginUnavailableError:
    """Return what a retry may mend."""
    return OriginUnavailableError("busy", url="s3://b/a.tar", remedy="wait")


async def test_unavailable_origins_are_requested_again() -> None:
    """Failures fewer than the attempts stay invisible, but counted."""
    script, counters = Script(unavailable(), unavailable()), Counters()
    assert await Retry(3, counters, NO_PAUSE).call(URL, script) == "done"
    assert (script.calls, counters.retries) == (3, 2)


async def test_the_last_try_s_error_says_how_many_there_were() -> None:
    """As many tries as allowed, and the same kind of error with url and remedy kept."""
    script = Script(*[unavailable() for _ in range(5)])
    with pytest.raises(OriginUnavailableError, match=r"busy.*after 4 attempts") as failed:
        await Retry(4, Counters(), NO_PAUSE).call(URL, script)
    assert (script.calls, failed.value.url, failed.value.remedy) == (4, "s3://b/a.tar", "wait")


@pytest.mark.parametrize("error", [AccessDeniedError("no"), NotFoundError("no"), ShardChangedError("no")])
async def test_permanent_errors_are_raised_at_once(error: Exception) -> None:
    """Denied, missing and replaced objects are asked for once."""
    script, counters = Script(error), Counters()
    with pytest.raises(type(error)):
        await Retry(5, counters, NO_PAUSE).call(URL, script)
    assert (script.calls, counters.retries) == (1, 0)


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_max=True), st.floats(0.001, 10), st.floats(0.001, 100))
def test_pauses_lie_below_a_bound_that_doubles_up_to_the_cap(
    failures: int, uniform: float, base_s: float, cap_s: float
) -> None:
    """Full jitter: anything from nothing to min(cap, base x 2^(failures - 1))."""
    backoff = Backoff(base_s, cap_s)
    bound_s = backoff.bound_s(failures)
    assert 0 <= backoff.pause_s(failures, uniform) <= bound_s <= cap_s
    assert backoff.pause_s(failures, 0.0) == 0
    assert backoff.bound_s(failures + 1) in (bound_s, 2 * bound_s, cap_s)
    assert backoff.bound_s(1) == min(base_s, cap_s)


REPLACED, CORRUPT, MISSING = ShardChangedError("replaced"), CorruptShardError("corrupt"), NotFoundError("missing")


@pytest.mark.parametrize(
    ("failures", "calls", "error"),
    [
        ([REPLACED, REPLACED], 3, None),
        ([REPLACED, CORRUPT], 3, None),
        ([REPLACED, REPLACED, REPLACED, REPLACED], 3, REPLACED),
        ([CORRUPT], 2, None),
        ([CORRUPT, CORRUPT], 2, CORRUPT),
        ([MISSING], 1, MISSING),
    ],
)
async def test_refetch(failures: list[ShardcacheError], calls: int, error: ShardcacheError | None) -> None:
    """An object that was replaced is fetched three times at most, and a corrupt one twice."""
    script = Script(*failures)
    if error is None:
        assert await refetch(script)() == "done"
    else:
        with pytest.raises(type(error), match=error.message):
            await refetch(script)()
    assert script.calls == calls
