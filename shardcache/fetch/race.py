"""Two coroutines of which one result is wanted."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def race(
    first: Coroutine[Any, Any, T],
    patience_s: float,
    second: Callable[[Callable[[], Awaitable[bool]]], Coroutine[Any, Any, T]],
) -> tuple[T, bool]:
    """Run `first`, and `second` as well after `patience_s`, until one is done.

    The other has ended when this returns.

    Args:
        second: called with a function that cancels `first` and returns whether it could; only after
            that may `second` do what must not be done twice. If it returns without having cancelled
            `first`, `first` goes on.

    Returns the result, and True if it is that of `first`. Raises what either raises, after
    cancelling the other.
    """
    try:
        async with asyncio.TaskGroup() as group:
            leader = group.create_task(first)

            async def end_leader() -> bool:
                leader.cancel()
                await asyncio.wait([leader])
                return leader.cancelled()

            await asyncio.wait([leader], timeout=patience_s)
            if not leader.done():
                spare = group.create_task(second(end_leader))
                await asyncio.wait([leader])
                if not leader.cancelled():
                    spare.cancel()
    except BaseExceptionGroup as failures:
        cause = failures.exceptions[0]
        raise cause from cause.__cause__

    if leader.cancelled():  # by `second`, through `end_leader`
        return spare.result(), False
    return leader.result(), True
