"""Waiting for a thread's work to end, even if the task that waits is cancelled.

A thread cannot be cancelled: it continues to write, remove or read its files. Until it ends, nobody
else may use them, and their bytes cannot be accounted for.
"""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def finished(work: Awaitable[T]) -> T:
    """Return the result of some work. If this task is cancelled, it ends after the work."""
    job = asyncio.ensure_future(work)
    cancelled = await wait_despite_cancellation(job)
    if cancelled is not None:
        raise cancelled
    return job.result()


async def wait_despite_cancellation(job: "asyncio.Future[T]") -> asyncio.CancelledError | None:
    """Wait for the end of some work, even if this task is cancelled.

    Returns the cancellation, which the caller raises; None if the task was not cancelled.
    """
    cancelled: asyncio.CancelledError | None = None
    while not job.done():
        try:
            await asyncio.wait([job])
        except asyncio.CancelledError as exn:
            cancelled = exn
    job.exception()  # marks the exception as retrieved: asyncio logs those that nobody retrieves
    return cancelled
