"""Two coroutines of which only one result is needed.

Hedged requests use it: the first request for some bytes races a second one.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def race(
    first: Coroutine[Any, Any, T],
    patience_s: float,
    second: Callable[[Callable[[], Awaitable[bool]]], Coroutine[Any, Any, T]],
) -> tuple[T, bool]:
    """Run `first`; after a while run `second` at the same time; return the result that counts.

    Both have ended when this returns.

    Args:
        first: the coroutine that is started immediately.
        patience_s: time after which `second` is started, if `first` is not done by then.
        second: returns the other coroutine. It is called with a function that cancels `first`, and
            returns False if `first` was already done. The second coroutine must call this function
            before it does something that must not be done twice. If it returns without having
            cancelled `first`, its result is ignored and `first` goes on.

    Return the result, and True if it is that of `first`. If either raises an error, the other is
    cancelled and the error is raised.
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
        # The task group has cancelled the other task, so the first error is the cause.
        cause = failures.exceptions[0]
        raise cause from cause.__cause__

    if leader.cancelled():  # by `second`, through `end_leader`
        return spare.result(), False
    return leader.result(), True
