"""Work of threads that has to end before its task does, even if the task is cancelled.

A thread cannot be cancelled: it goes on to write, remove or read its files. Until it ends, nobody
else may use them, and their bytes cannot be accounted for.
"""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def finished(work: Awaitable[T]) -> T:
    """Return the result of some work. If this task is cancelled, wait for the work's end first."""
    job = asyncio.ensure_future(work)
    cancelled = await wait_in_any_case(job)
    if cancelled is not None:
        raise cancelled
    return job.result()


async def wait_in_any_case(job: "asyncio.Future[T]") -> asyncio.CancelledError | None:
    """Wait for the end of some work, even if this task is cancelled; return the cancellation."""
    cancelled: asyncio.CancelledError | None = None
    while not job.done():
        try:
            await asyncio.wait([job])
        except asyncio.CancelledError as exn:
            cancelled = exn
    job.exception()  # this retrieves the exception: asyncio logs exceptions that nobody retrieves
    return cancelled
