"""Health probes: what each of them takes for well, and what they say otherwise."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from shardcache.cli.probing import HUNG_S, PASSES, ask, passes
from shardcache.errors import DaemonError, NoDaemonError
from shardcache.protocol import SOCKET_ENV
from shardcache.server import lifecycle
from support.programs.guard import GUARD_S

HEAVY = ("click", "aiohttp", "asyncio", "rich", "pydantic")


@asynccontextmanager
async def answering(path: Path, *texts: str) -> AsyncIterator[None]:
    """Answer requests for health at a socket with one text after another, and then with the last of them."""
    left = list(texts)

    async def health(_request: web.Request) -> web.Response:
        return web.Response(text=left.pop(0) if len(left) > 1 else left[0])

    app = web.Application()
    app.router.add_get("/v1/health", health)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.UnixSite(runner, str(path)).start()
        yield
    finally:
        await runner.cleanup()


async def run(*command: str, at: Path) -> tuple[int, str, str]:
    """Run Python with arguments and the socket's path; return its exit code and what it printed."""
    env = os.environ | {SOCKET_ENV: str(at)}
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", *command],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=GUARD_S,
    )
    return done.returncode, done.stdout.strip(), done.stderr


@pytest.mark.parametrize("status", ["ok", "degraded", "draining"])
async def test_each_probe_passes_what_it_is_for(tmp_path: Path, status: str) -> None:
    """A bad disk and an end in good order are no reason to restart a daemon; only one that is well is ready."""
    path = tmp_path / "s"
    async with answering(path, json.dumps({"status": status})):
        found = {what: await run("shardcache.cli.probing", what, at=path) for what in PASSES}
    passed = {what for what, (code, *_) in found.items() if code == 0}
    expected = {"ok": {"startup", "ready", "live"}, "degraded": {"startup", "live"}, "draining": {"live"}}
    assert passed == expected[status]
    assert {out for _, out, _ in found.values()} == {status}


async def test_the_command_asks_the_same(tmp_path: Path) -> None:
    """`shardcache probe` prints what the daemon says, and exits by it."""
    path = tmp_path / "s"
    async with answering(path, '{"status": "degraded", "disk": {"error": "read-only"}}'):
        live = await run("shardcache", "probe", "live", at=path)
        ready = await run("shardcache", "probe", "ready", "--json", at=path)
    assert live[:2] == (0, "degraded")
    assert ready[0] == 1 and json.loads(ready[1])["disk"]["error"] == "read-only"


async def test_probe_waits_for_a_daemon_that_is_not_well_yet(tmp_path: Path) -> None:
    """With --wait-s the command asks until it gets a good answer, so that scripts need no loop of their own."""
    path = tmp_path / "s"
    async with answering(path, '{"status": "degraded"}', '{"status": "degraded"}', '{"status": "ok"}'):
        assert (await run("shardcache", "probe", "ready", "--wait-s", "60", at=path))[:2] == (0, "ok")


@pytest.mark.parametrize(("silent_s", "alive"), [(0.0, True), (HUNG_S, True), (HUNG_S + 1, False)])
def test_a_disk_that_hangs_ends_a_daemon(silent_s: float, alive: bool) -> None:
    """The liveness probe gives a daemon up by the rule by which it gives itself up under a watchdog."""
    assert passes("live", {"status": "degraded", "disk": {"silent_s": silent_s}}) is alive
    assert lifecycle._HUNG_S == HUNG_S


async def test_probes_fail_without_a_daemon(tmp_path: Path) -> None:
    """Where no daemon is, a probe fails with the exit code for that, and says what to do."""
    code, _, err = await run("shardcache.cli.probing", "live", at=tmp_path / "s")
    assert code == 3 and "shardcache serve" in err


def test_silence_is_no_answer(tmp_path: Path) -> None:
    """A daemon that takes a connection and never answers is found out in the time that it has."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        with pytest.raises(NoDaemonError, match="no answer within"):
            ask(tmp_path / "s", 0.05)


async def test_another_program_is_no_daemon(tmp_path: Path) -> None:
    """An answer that no daemon gives is not taken for one."""
    async with answering(tmp_path / "s", "hello"):
        with pytest.raises(DaemonError, match="not a shardcache daemon"):
            await asyncio.to_thread(ask, tmp_path / "s")


def test_a_probe_loads_little() -> None:
    """The probe that runs every few seconds on each node imports the standard library alone."""
    code = f"import sys, shardcache.cli.probing; print([name for name in {HEAVY} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_a_probe_that_does_not_exist_is_a_usage_error() -> None:
    """A misspelt probe exits 2, so that it is never taken for a daemon that is well."""
    done = subprocess.run([sys.executable, "-m", "shardcache.cli.probing", "alive"], capture_output=True, check=False)
    assert done.returncode == 2
