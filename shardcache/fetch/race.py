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
            first_task = group.create_task(first)

            async def end_first() -> bool:
                first_task.cancel()
                await asyncio.wait([first_task])
                return first_task.cancelled()

            await asyncio.wait([first_task], timeout=patience_s)
            if not first_task.done():
                second_task = group.create_task(second(end_first))
                await asyncio.wait([first_task])
                if not first_task.cancelled():
                    second_task.cancel()
    except BaseExceptionGroup as failures:
        # The task group has cancelled the other task, so the first error is the cause.
        cause = failures.exceptions[0]
        raise cause from cause.__cause__

    if first_task.cancelled():  # by `second`, through `end_first`
        return second_task.result(), False
    return first_task.result(), True
