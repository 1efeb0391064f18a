"""Background tasks of the cache, which are run again after an error until they are stopped.

`Cache` starts one task each for prefetching, the health of the disk, and the like.
"""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from shardcache.shared.exceptions import ShardcacheError

log = structlog.get_logger()

_AGAIN_S = 1.0  # pause after an error, before the task is run again


class BackgroundTasks:
    """Tasks that run until `stop`.

    Args:
        group: the task group that runs them.
    """

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        """Start a task, which ends when `run` returns.

        Args:
            name: name of the task, for the log.
            run: the task's work, which is called again after an error.
        """
        self._tasks.append(self._group.create_task(_run_despite_errors(name, run), name=name))

    def stop(self) -> None:
        """Cancel the tasks."""
        for task in self._tasks:
            task.cancel()


async def _run_despite_errors(name: str, run: Callable[[], Awaitable[None]]) -> None:
    """Run a task, and run it again after an error.

    Such errors can come from a lack of file descriptors or threads, which must not end the daemon.
    """
    while True:
        try:
            return await run()
        except (OSError, RuntimeError, ShardcacheError) as exn:
            log.error("background task failed; running it again", task=name, cause=str(exn))
        except Exception:  # a top-level guard, like those of transfers and of sessions
            log.exception("unexpected error in a background task; running it again", task=name)
        await asyncio.sleep(_AGAIN_S)
