"""Event loops with a virtual clock: one that tests move, and one that leaps over waits."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec

P = ParamSpec("P")


class StillLoop(asyncio.SelectorEventLoop):
    """An event loop whose time only a test moves: add to `now_s` and let the tasks run."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s


class LeapingLoop(StillLoop):
    """An event loop whose time leaps to the next timer as soon as every task waits."""

    def __init__(self) -> None:
        selector = selectors.DefaultSelector()
        wait = selector.select

        def select(timeout: float | None = None) -> list[Any]:
            if timeout is None:  # no timer: another thread, or a socket, is waited for
                return wait(None)
            events = wait(0)
            self.now_s += 0.0 if events else timeout
            return events

        selector.select = select  # type: ignore[method-assign]
        super().__init__(selector)


def leaping(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Decorate a test that is to run on a `LeapingLoop`."""
    return _on(LeapingLoop, test)


def still(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Decorate a test that is to run on a `StillLoop`."""
    return _on(StillLoop, test)


def _on(
    loop_factory: type[StillLoop], test: Callable[P, Coroutine[Any, Any, None]]
) -> Callable[P, None]:
    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(test(*args, **kwargs))

    return run


def pass_time(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, StillLoop)
    loop.now_s += seconds


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)
