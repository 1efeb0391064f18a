"""The demo's object store, and its node: a daemon, and the commands and jobs that it serves.

`demo_command` uses `s3_server` and a `DemoNode`. Each process that the node starts is ended when
the context that started it exits. A command is a list: a Python module, run as by `python -m`, and
its arguments. A job is a training job; each of its ranks is a process.

Modules that take long to import, such as asyncio, are imported in functions. `shardcache --help`
also imports this module, and so starts sooner.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardcache.cli import common
from shardcache.cli.admin_client import AdminClient
from shardcache.shared.exceptions import NoDaemonError, ShardcacheError
from shardcache.shared.protocol import Json
from shardcache.shared.socket_paths import SOCKET_ENV

if TYPE_CHECKING:
    from asyncio.subprocess import Process

RANKS = 2
"""Number of ranks of a training job."""

_EPOCHS = 2  # number of epochs that each job reads
_SHARD_SIZE = "150kB"
_BUCKET = "shapes"
_CONFIG = """
[[origin]]
match = "s3://"
endpoint_url = "{endpoint}"
region = "us-east-1"
storage_options = {{ key = "demo", secret = "demo" }}
"""
# Variables of every process of the node.
_ENV = {
    # The credentials of the demo's store are in `_CONFIG`. The user's own are not looked up.
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "NO_PROXY": "127.0.0.1",
    "PYTHONSAFEPATH": "1",  # keeps modules in the working folder from shadowing the demo's
}
# Further variables of commands and jobs: a rank computes in one thread, and ranks reach each other
# over the loopback interface.
_JOB_ENV = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
_STOP_LIMIT_S = 10  # time between SIGTERM and SIGKILL
_RETRY_S = 0.05  # interval between attempts to reach a daemon that is starting
_SHOWN_LOG_LINES = 60  # number of lines of a log that an error shows


@contextmanager
def s3_server() -> Iterator[str]:
    """Serve S3 with an empty bucket from this process's memory; yield its endpoint."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # hides its line per request
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        with closing(HTTPConnection(host, port)) as s3:
            s3.request("PUT", f"/{_BUCKET}")
            s3.getresponse()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


class DemoNode:
    """The demo's node: its daemon and jobs, with their socket, cache and logs in a folder.

    Args:
        folder: an existing folder.
        endpoint: url of the object store.
    """

    def __init__(self, folder: Path, endpoint: str) -> None:
        self._folder = folder
        self._socket = folder / "shardcache.sock"
        # The demo's config file is used in place of the machine's own.
        self._config = folder / "shardcache.toml"
        self._config.write_text(_CONFIG.format(endpoint=endpoint))
        # The demo ignores the user's options and credentials.
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SHARDCACHE_", "AWS_"))
        }
        self._env = inherited | _ENV

    async def write(self, images: Path) -> Json:
        """Write a folder of images to the store with `shardcache write`; return its summary."""
        command = [
            "shardcache",
            "write",
            images,
            f"s3://{_BUCKET}",
            "--classes",
            "--shuffle=0",
            f"--shard-size={_SHARD_SIZE}",
            f"--config={self._config}",
            "--json",
        ]
        await self._run_command("write", command)
        # The summary is the last line of the command's output, which goes to its log.
        output = self._log_path("write").read_text()
        summary: Json = json.loads(output.splitlines()[-1])
        return summary

    @asynccontextmanager
    async def daemon(self) -> AsyncIterator[None]:
        """Run `shardcache serve` on an empty cache.

        The daemon is ready when the context is entered.
        """
        command = [
            "shardcache",
            "serve",
            f"--config={self._config}",
            f"--socket={self._socket}",
            f"--cache-dir={self._folder / 'cache'}",
            "--capacity=1GB",
            "--min-free=0",
        ]
        async with self._running("daemon", command, env={}) as process:
            await self._wait_until_ready(process)
            yield

    async def _wait_until_ready(self, daemon: Process) -> None:
        """Wait until the daemon answers. Raises ShardcacheError if its process ends."""
        import asyncio

        while daemon.returncode is None:
            try:
                await self.status()
                return
            except NoDaemonError:
                # The daemon does not listen yet. The pause ends early if the process ends.
                with suppress(TimeoutError):
                    await asyncio.wait_for(daemon.wait(), _RETRY_S)
        raise self._failure("daemon", "the daemon did not start")

    async def train(
        self,
        url: str,
        *,
        name: str,
        job: str,
        seed: int,
        ranks: int = RANKS,
        stop_after: int | None = None,
    ) -> list[Any]:
        """Run a training job, from its checkpoint if there is one; return each rank's reports.

        Args:
            url: url of the dataset's index file.
            name: name of this run, after which its log and the folder of its reports are named.
            job: name of the job. All runs of a job share one checkpoint.
            seed: seed of the shuffle.
            ranks: number of ranks.
            stop_after: number of batches of the last epoch after which the job writes its
                checkpoint and stops; None to read to the end.
        """
        reports = self._folder / name
        reports.mkdir()
        program = Path(__file__).with_name("demo_training.py")
        command: list[Any] = [
            "torch.distributed.run",
            "--standalone",
            "--local-addr=127.0.0.1",
            f"--nproc-per-node={ranks}",
            program,
            url,
            f"--job={job}",
            f"--seed={seed}",
            f"--epochs={_EPOCHS}",
            f"--reports={reports}",
            f"--checkpoint={self._folder / job}.pt",
        ]
        if stop_after is not None:
            command.append(f"--stop-after={stop_after}")
        await self._run_command(name, command)
        files = [reports / f"rank-{rank}.json" for rank in range(ranks)]
        return [json.loads(file.read_text()) for file in files]

    async def status(self) -> Json:
        """Return the daemon's status, as JSON."""
        return await common.in_thread(AdminClient(self._socket).status)

    async def _run_command(self, name: str, command: list[Any]) -> None:
        """Run a command to its end; raise ShardcacheError if it fails.

        An environment variable tells the process where the daemon is.

        Args:
            name: name of the process, for its log and for errors.
            command: a Python module and its arguments.
        """
        env = {SOCKET_ENV: str(self._socket)} | _JOB_ENV
        async with self._running(name, command, env) as process:
            if await process.wait():
                raise self._failure(name, f"{name} failed with exit code {process.returncode}")

    @asynccontextmanager
    async def _running(
        self,
        name: str,
        command: list[Any],
        env: dict[str, str],
    ) -> AsyncIterator[Process]:
        """Run a command in a process, which is ended when the context exits.

        Args:
            name: name of the process, for its log.
            command: a Python module and its arguments.
            env: variables in addition to the node's.
        """
        import asyncio

        with self._log_path(name).open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                *map(str, command),
                env=self._env | env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # The process leads a group of its own: Ctrl-C reaches only the demo, which then
                # stops its processes in order.
                start_new_session=True,
            )
        try:
            yield process
        finally:
            try:
                if process.returncode is None:
                    # SIGTERM goes to the process alone, which then stops its own children.
                    process.terminate()
                    with suppress(TimeoutError):
                        await asyncio.wait_for(process.wait(), _STOP_LIMIT_S)
            finally:
                # The process may still run: it took too long, or this task was cancelled while it
                # waited. SIGKILL goes to the whole group, since a process that is killed cannot
                # stop its children.
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    await process.wait()

    def _log_path(self, name: str) -> Path:
        """Return the path of the file that has all output of a process."""
        return self._folder / f"{name}.log"

    def _failure(self, name: str, message: str) -> ShardcacheError:
        """Return an error with the end of a process's log."""
        log_lines = self._log_path(name).read_text(errors="replace").splitlines()
        shown_lines = [f"{message}; the end of its log:", *log_lines[-_SHOWN_LOG_LINES:]]
        return ShardcacheError("\n    ".join(shown_lines))
