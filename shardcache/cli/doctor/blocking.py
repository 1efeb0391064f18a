"""What blocks, in threads that nobody waits for at the end: a disk that hangs must not keep the report from coming."""

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
    """Return what a function returns, or raise its OSError or ShardcacheError; it may raise no others."""
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()  # so that it takes a result also when nobody waits for one any more

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except (OSError, ShardcacheError) as exn:
            future.set_exception(exn)

    threading.Thread(target=run, name=function.__name__, daemon=True).start()
    return await asyncio.wrap_future(future)
