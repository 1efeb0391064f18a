"""Transport workers as the daemon meets them: real processes, real servers, real kills."""

import asyncio
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shardcache.transport import worker_handle, worker_pool
from shardcache.transport.between.flow import Flow
from shardcache.transport.between.messages import Answer, Body, Request
from shardcache.transport.between.parts import Parts
from shardcache.transport.http import opening
from shardcache.transport.http.gate import Gate
from shardcache.transport.running_request import TransportError
from shardcache.transport.worker_pool import Workers
from support.cases import first_quick
from support.network.lead import SILENT, silent_address
from support.network.scripted_server import Reply, ScriptedServer, answer
from support.programs.daemon import eventually
from support.programs.guard import GUARD_S
from support.programs.processes import children, transport_workers
from support.stores.mischief import Ending

DATA = bytes(range(256)) * 8192
BLANK = bytes(len(DATA))
MAX = 2
HANGS = Reply(b"", Ending.HANG)


class Rig:
    """Workers, and a file to be filled."""

    def __init__(self, folder: Path) -> None:
        self.workers = Workers(MAX)
        self.path = folder / "a.part"
        self.path.write_bytes(BLANK)
        self.body = Body(Parts(str(self.path), None, len(DATA), 0, len(DATA)), 206, {})
        # Workers of datasets that read without a daemon before.
        self._others = transport_workers(os.getpid())

    def pids(self) -> set[int]:
        """Return the processes that these workers have started."""
        return transport_workers(os.getpid()) - self._others

    @property
    def written(self) -> bytes:
        """Contents of the file."""
        return self.path.read_bytes()

    async def ask(self, server: ScriptedServer, **options: Any) -> Answer:
        """Ask for something that goes nowhere, by a `Request` with further options."""
        ahead = options.pop("ahead", None)
        return await self.workers.ask(Request("GET", server.url(), {}, **options), ahead)

    async def fetch(
        self, server: ScriptedServer, flow: Flow | None = None, **options: Any
    ) -> Answer | None:
        """Ask for all of the file, as `Workers.fetch` does with further options."""
        request = Request("GET", server.url(), {})
        body = replace(self.body, held="commit" in options)
        return await self.workers.fetch(request, body, flow or Flow(), **options)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """A rig whose processes end with the test."""
    made = Rig(tmp_path)
    yield made
    await made.workers.close()
    assert not made.pids()


@pytest.mark.slow
async def test_workers_start_under_load_and_never_more_than_the_limit(rig: Rig) -> None:
    """A few requests share one worker; of many, none waits, and later ones are spread."""
    with ScriptedServer(HANGS) as server:
        tasks = [asyncio.create_task(rig.ask(server))]
        await server.asked(1)
        assert len(rig.pids()) == 1
        tasks += [asyncio.create_task(rig.ask(server)) for _ in range(20)]
        await server.asked(21)
        assert repr(rig.workers).startswith("<Workers [21")
        await asyncio.to_thread(
            eventually, lambda: repr(rig.workers) == "<Workers [21, 0] requests>"
        )
        tasks += [asyncio.create_task(rig.ask(server)) for _ in range(21)]
        await server.asked(42)
        assert repr(rig.workers) == "<Workers [21, 21] requests>"
        assert len(rig.pids()) == MAX
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    assert repr(rig.workers) == "<Workers [0, 0] requests>"


async def test_a_worker_that_does_not_start_is_ended(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the time limit, or when the daemon stops; the other takes the requests meanwhile."""
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nexec sleep 1000 # $*\n")
    silent.chmod(0o755)
    with ScriptedServer(HANGS) as server:
        tasks = [asyncio.create_task(rig.ask(server)) for _ in range(4)]
        await server.asked(4)
        (first,) = rig.pids()
        monkeypatch.setattr(sys, "executable", str(silent))
        before = set(children(os.getpid()))
        for limit_s in (0.5, 1000.0):
            monkeypatch.setattr(worker_pool, "_START_LIMIT_S", limit_s)
            tasks.append(asyncio.create_task(rig.ask(server)))
            await asyncio.to_thread(eventually, lambda: set(children(os.getpid())) > before)
            await server.asked(len(tasks))
            # Until it runs `sleep`, the silent process has the arguments of a worker.
            await asyncio.to_thread(eventually, lambda: rig.pids() == {first})
            if limit_s < 1:
                await asyncio.to_thread(eventually, lambda: set(children(os.getpid())) == before)
                # No other worker starts until then.
                await asyncio.to_thread(eventually, lambda: not rig.workers._is_growing)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await rig.workers.close()
    assert set(children(os.getpid())) == before - {first}


async def test_requests_for_one_file_share_a_worker(rig: Rig) -> None:
    """However many there are: its writers take turns."""
    with ScriptedServer(HANGS) as server:
        tasks = [asyncio.create_task(rig.fetch(server)) for _ in range(20)]
        await server.asked(20)
        assert len(rig.pids()) == 1
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_a_killed_worker_fails_its_requests_and_is_replaced(rig: Rig) -> None:
    """In a way that a retry may mend; the next request is answered."""
    with ScriptedServer(HANGS, HANGS, HANGS, answer(DATA)) as server:
        tasks = [asyncio.create_task(rig.fetch(server)) for _ in range(3)]
        await server.asked(3)
        (pid,) = rig.pids()
        os.kill(pid, signal.SIGKILL)
        for failed in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(failed, TransportError)
            assert "killed" in str(failed)
        assert await rig.fetch(server)
        assert rig.written == DATA
        assert rig.pids() != {pid}


@pytest.mark.slow
async def test_stopped_worker_is_killed_and_replaced(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests fail as after a lost connection; another process answers the next one.

    A worker that answers pings is left alone, however long the server says nothing.
    """
    # A worker has four of them: others may need the processor for seconds.
    monkeypatch.setattr(worker_handle, "_MIN_PING_S", 0.75)
    rig.workers = Workers(MAX, silence_s=0.1)
    release = threading.Event()
    with ScriptedServer(HANGS, HANGS, Reply(b"", then=lambda sock: late(sock, release))) as server:
        tasks = [asyncio.create_task(rig.fetch(server)) for _ in range(2)]
        await server.asked(2)
        (pid,) = rig.pids()
        os.kill(pid, signal.SIGSTOP)
        for failed in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(failed, TransportError)
        task = asyncio.create_task(rig.fetch(server))
        await server.asked(3)
        done, _ = await asyncio.wait([task], timeout=4.0)
        assert not done
        release.set()
        assert await task
        assert rig.written == DATA
        assert pid not in rig.pids()


def late(sock: socket.socket, release: threading.Event) -> None:
    """Answer when released."""
    release.wait(GUARD_S)
    sock.sendall(answer(DATA))


@pytest.mark.parametrize("phase", first_quick(["tunnel", "handshake", "connection"]))
async def test_cancelled_request_leaves_nothing_open_while_it_connects(
    phase: str, rig: Rig
) -> None:
    """No thread or descriptor stays open, even if the proxy or the server is silent."""
    drip = Reply(b"HTTP/1.1 200 ", then=dripping)
    with (
        ScriptedServer(answer(DATA)) as other,
        ScriptedServer(drip) as server,
        silent_address(server.port),
    ):
        await rig.ask(other)
        (pid,) = rig.pids()
        before = open_files(pid)
        for number in range(3):
            request = {
                "tunnel": Request("GET", "https://far.example/a.tar", {}, proxy=server.url("")),
                "handshake": Request("GET", server.url().replace("http", "https"), {}),
                "connection": Request("GET", server.url(host=SILENT), {}),
            }[phase]
            task = asyncio.create_task(rig.workers.ask(request))
            await asyncio.to_thread(eventually, lambda: open_files(pid) > before)
            if phase != "connection":
                await asyncio.to_thread(eventually, partial(came, server, number + 1))
            task.cancel()
            await asyncio.wait([task])
            await asyncio.to_thread(eventually, lambda: open_files(pid) == before)
        assert rig.pids() == {pid}


@pytest.mark.slow
async def test_a_request_sent_ahead_leaves_nothing_open(rig: Rig) -> None:
    """It may be cancelled while it connects, or nobody may come for the answer."""
    with ScriptedServer(answer(DATA)) as server, silent_address(server.port):
        await rig.ask(server)
        (pid,) = rig.pids()
        before = open_files(pid)
        request = Request("GET", server.url(host=SILENT), {})
        await rig.ask(server, ahead=request)
        await asyncio.to_thread(eventually, lambda: open_files(pid) > before)
        task = asyncio.create_task(rig.workers.fetch(request, rig.body, Flow()))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.wait([task])
        await asyncio.to_thread(eventually, lambda: open_files(pid) == before)
        await rig.ask(server, ahead=Request("GET", server.url("/b.tar"), {}))
        await server.asked(4)
        await asyncio.to_thread(eventually, lambda: open_files(pid) == before)


@pytest.mark.slow
async def test_dripped_tunnel_fails_at_the_limit_in_all(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though each byte comes in time."""
    monkeypatch.setattr(opening, "_OPEN_LIMIT_S", 0.5)
    with ScriptedServer(Reply(b"HTTP/1.1 200 ", then=dripping)) as proxy:
        server = opening.Server("https", "far.example", proxy.url(""), None, far_only=False)
        with pytest.raises(TimeoutError, match=r"no connection to far\.example:443 within 0\.5 s"):
            await asyncio.to_thread(opening.open_connection, server, Gate(math.inf))
        await asyncio.to_thread(proxy.wait_closed, 1)


def came(server: ScriptedServer, connections: int) -> bool:
    """Return whether there were as many connections."""
    return server.connections >= connections


def dripping(sock: socket.socket) -> None:
    """Send a byte from time to time, for as long as the other side listens."""
    while True:
        sock.sendall(b"O")
        threading.Event().wait(0.02)


def open_files(pid: int) -> int:
    """Return the number of a process's descriptors."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


async def test_a_cancelled_request_writes_nothing_more(rig: Rig) -> None:
    """The file does not change after cancellation, though the server continues sending."""
    came = asyncio.Event()
    half = answer(DATA)[: len(DATA) // 2]
    with ScriptedServer(Reply(half, Ending.HANG), answer(DATA)) as server:
        task = asyncio.create_task(rig.fetch(server, Flow(lambda _count: came.set())))
        await came.wait()
        task.cancel()
        await asyncio.wait([task])
        rig.path.write_bytes(BLANK)
        await asyncio.to_thread(server.wait_closed, 1)
        assert rig.written == BLANK
        assert await rig.fetch(server)  # by the same process
        assert rig.written == DATA


@pytest.mark.slow
async def test_silent_idle_connection_is_announced_to_every_process(rig: Rig) -> None:
    """One question loses time after a fault cut off all connections of all processes."""
    last = [HANGS, answer(b"", status="204 No Content")]
    first = [answer(b"", status="200 OK")] * 8
    with ScriptedServer(answer(b"", status="200 OK")) as other:
        while len(rig.pids()) < MAX:  # the first may be done with all before the second has started
            await asyncio.gather(*(rig.ask(other) for _ in range(8)))
    with ScriptedServer(*first, *last) as server:
        await asyncio.gather(*(rig.ask(server) for _ in range(8)))
        connections = server.connections
        task = asyncio.create_task(rig.ask(server))
        await server.asked(9)
        task.cancel()
        await asyncio.wait([task])
        await asyncio.to_thread(server.wait_closed, connections)
        answers = await asyncio.gather(*(rig.ask(server) for _ in range(8)))
        assert {each.status for each in answers} == {204}
