"""Ranged requests of one connection after the other, from a process of its own, at full speed."""

import asyncio
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RANGE_BYTES = 4096
_CONNECTIONS = 16


@dataclass(slots=True)
class _Run:
    """One run, of all connections."""

    requests: Iterator[bytes]
    ends_s: float
    answers: int = 0


class _Connection(asyncio.Protocol):
    """Sends a request, and the next one once it has the whole answer."""

    def __init__(self, run: _Run, ended: asyncio.Future[None]) -> None:
        self._run = run
        self._ended = ended
        self._answer = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(next(self._run.requests))

    def data_received(self, data: bytes) -> None:
        self._answer += data
        head, blank_line, body = self._answer.partition(b"\r\n\r\n")
        if not blank_line or len(body) < RANGE_BYTES:
            return
        if not head.startswith(b"HTTP/1.1 206"):
            self._fail(head.decode("latin-1"))
            return
        self._run.answers += 1
        self._answer = b""
        if time.perf_counter() < self._run.ends_s:
            self._transport.write(next(self._run.requests))
        else:
            self._ended.set_result(None)
            self._transport.close()

    def connection_lost(self, _exc: Exception | None) -> None:
        self._fail(f"the connection was closed after {self._answer[:1000]!r}")

    def _fail(self, why: str) -> None:
        if not self._ended.done():
            self._ended.set_exception(RuntimeError(why))
            self._transport.close()


def answers_per_s(host: str, port: int, requests: str, timed_s: float) -> float:
    """Return how many answers came in a second. Raises RuntimeError if one is wrong.

    Args:
        requests: JSON file of the requests, which are sent again and again.
    """
    import uvloop

    raw = [text.encode() for text in json.loads(Path(requests).read_text())]
    return uvloop.run(_measured(host, port, raw, timed_s))


async def _measured(host: str, port: int, requests: list[bytes], timed_s: float) -> float:
    loop = asyncio.get_running_loop()
    started_s = time.perf_counter()
    run = _Run(itertools.cycle(requests), started_s + timed_s)
    ends = [loop.create_future() for _ in range(_CONNECTIONS)]
    for ended in ends:
        await loop.create_connection(lambda ended=ended: _Connection(run, ended), host, port)  # type: ignore[misc]
    await asyncio.gather(*ends)
    return run.answers / (time.perf_counter() - started_s)
