"""Background tasks of the cache: run until they are stopped, again after an error."""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from shardcache.errors import ShardcacheError

log = structlog.get_logger()

_AGAIN_S = 1.0  # pause after an error


class BackgroundTasks:
    """Tasks that run in a group until `stop`."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        """Start a task, which ends when `run` returns."""
        self._tasks.append(self._group.create_task(_run_despite_errors(name, run), name=name))

    def stop(self) -> None:
        """Cancel the tasks."""
        for task in self._tasks:
            task.cancel()


async def _run_despite_errors(name: str, run: Callable[[], Awaitable[None]]) -> None:
    """Run a task, again after errors: a lack of descriptors or threads must not end the daemon."""
    while True:
        try:
            return await run()
        except (OSError, RuntimeError, ShardcacheError) as exn:
            log.error("background task failed; running it again", task=name, cause=str(exn))
        except Exception:  # a top-level guard, as of transfers and sessions
            log.exception("unexpected error in a background task; running it again", task=name)
        await asyncio.sleep(_AGAIN_S)
