"""Blocking calls in daemon threads that are not joined at exit: a hanging disk must not block the report."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

from shardcache.errors import ShardcacheError

Args = ParamSpec("Args")
Result = TypeVar("Result")


async def in_thread(function: Callable[Args, Result], *args: Args.args, **kwargs: Args.kwargs) -> Result:
    """Run a function in a thread and return its result; it may raise only OSError and ShardcacheError."""
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()  # so that it accepts a result even after its waiter was cancelled

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except (OSError, ShardcacheError) as exn:
            future.set_exception(exn)

    threading.Thread(target=run, name=function.__name__, daemon=True).start()
    return await asyncio.wrap_future(future)
