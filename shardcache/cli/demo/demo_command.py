"""`shardcache demo`: a store, a daemon and two training jobs, and a check of what they read.

The user's part is `demo_training.py`; this is the world around it, each process of which ends when
its context exits.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardcache.cli import common
from shardcache.cli.admin_client import AdminClient
from shardcache.cli.demo.demo_data import SHAPES, draw_shape, write_data
from shardcache.cli.demo.demo_outcome import DemoOutcome, Epoch, epochs_of, show
from shardcache.errors import ConfigError, NoDaemonError, ShardcacheError
from shardcache.shared.protocol import Json
from shardcache.shared.socket_paths import SOCKET_ENV

if TYPE_CHECKING:
    from asyncio.subprocess import Process


_IMAGES = 577  # not divisible by the number of ranks or workers
_SHARD_SIZE = "150kB"
_PIXELS = 64
_RANKS = 2
_EPOCHS = 2
_BUCKET = "shapes"
_CONFIG = """
[[origin]]
match = "s3://"
endpoint_url = "{endpoint}"
region = "us-east-1"
storage_options = {{ key = "demo", secret = "demo" }}
"""
_ENV = {
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "NO_PROXY": "127.0.0.1",
    "PYTHONSAFEPATH": "1",  # modules of the working folder shadow none of its own
}
_GRACE_S = 10
_TRY_AGAIN_S = 0.05
_LOG_LINES = 60


@common.examples("demo", "demo --data data")
@click.command()
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Only write the sample data of the documentation's pages, into this new folder.",
)
@common.json_option
def demo(data: Path | None, as_json: bool) -> None:
    """Run a complete example on this machine, without external services.

    Starts an S3 server, writes a small dataset of JPEG images to it, and starts a daemon with an
    empty cache. Two training jobs then run at the same time for 2 epochs, each with 2 ranks of 2
    DataLoader workers. One of them is stopped midway and resumes from its checkpoint with 1 rank.
    Exits 1 unless every job read each sample exactly once per epoch (apart from padding), all ranks
    took the same number of steps, and the dataset was downloaded only once. Removes all its files
    at the end.
    """
    if data is not None:
        _write_data(data, as_json)
        return
    _require("torch", "moto", "flask", "PIL")
    # The same orderly shutdown as of Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    import asyncio

    say: Callable[[str], object] = _say_nothing
    if not as_json:
        say = common.make_console().print
    with tempfile.TemporaryDirectory(prefix="shardcache-demo-") as folder:
        outcome = asyncio.run(_run(Path(folder), say))
    if as_json:
        common.print_json(outcome.to_json())
    else:
        show(outcome)
    if not outcome.ok:
        common.fail()


def _say_nothing(line: str) -> None:
    """Leave out a line that describes a step."""


def _require(*packages: str) -> None:
    """Raise ShardcacheError if any of these packages is not installed."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ShardcacheError(
            f"the demo needs packages that are not installed: {', '.join(missing)}",
            remedy="pip install 'shardcache[demo]'",
        )


def _write_data(folder: Path, as_json: bool) -> None:
    """Write the documentation's data into a folder that is new or empty, and say what is in it."""
    _require("PIL")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(
            f"{folder} is not empty",
            remedy="name a new folder: --data DIR",
        )
    write_data(folder)
    names = sorted(path.name for path in folder.iterdir())
    if as_json:
        common.print_json({"folder": str(folder), "names": names})
    else:
        common.make_console().print(f"{folder}: {', '.join(names)}")


async def _run(folder: Path, say: Callable[[str], object]) -> DemoOutcome:
    """Run the demo in a folder, and describe each step; return its outcome."""
    import asyncio

    say(f"drawing {_IMAGES} JPEG images")
    keys = await asyncio.to_thread(_draw, folder / "images")
    with _s3_server() as endpoint:
        say(
            f"starting an S3 server at {endpoint}, and writing them to it as tar shards: "
            "shardcache write",
        )
        node = _DemoNode(folder, endpoint)
        dataset = await node.write(folder / "images")
        say("starting a daemon with an empty cache")
        async with node.daemon():
            say(
                f"training 2 concurrent jobs from {dataset['index']}: {_RANKS} ranks × 2 workers "
                "each;",
            )
            say(
                "the second is stopped midway through its last epoch, and resumes from its "
                "checkpoint with 1 rank",
            )
            epochs = await _train(node, dataset["index"])
            fetched_bytes = (await node.status())["counters"]["origin_bytes"]
    return DemoOutcome(keys, dataset["shards"], dataset["bytes"], epochs, fetched_bytes)


async def _train(node: _DemoNode, urls: str) -> list[Epoch]:
    """Run both jobs at the same time; return what each has read in each epoch."""
    import asyncio

    # Different seeds, and so different orders: one download still serves both.
    async def train_first() -> list[list[Any]]:
        return [await node.train(urls, "first", "first", seed=0)]

    async def train_second() -> list[list[Any]]:
        stopped = await node.train(urls, "second", "second", seed=1, stop_after=8)
        resumed = await node.train(urls, "resumed", "second", seed=1, ranks=1)
        return [stopped, resumed]

    try:
        async with asyncio.TaskGroup() as group:
            first = group.create_task(train_first())
            second = group.create_task(train_second())
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [*epochs_of("first", first.result()), *epochs_of("second", second.result())]


# The dataset: small JPEG images of shapes, drawn on each run


def _draw(folder: Path) -> frozenset[str]:
    """Draw the images, `<shape>/<number>.jpg`; return their names without the suffix."""
    rng = random.Random(0)
    keys = [f"{rng.choice(list(SHAPES))}/{number:03d}" for number in range(_IMAGES)]
    for key in keys:
        path = folder / f"{key}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(draw_shape(path.parent.name, rng, _PIXELS, _PIXELS))
    return frozenset(keys)


# The object store, and the node


@contextmanager
def _s3_server() -> Iterator[str]:
    """Serve S3 with an empty bucket from this process's memory; yield its endpoint."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # no log line per request
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


class _DemoNode:
    """The demo's node: its daemon and jobs, with their socket, cache and logs in a folder."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        self._folder = folder
        self._socket = folder / "shardcache.sock"
        # With it, the machine's own config file is not read.
        self._config = folder / "shardcache.toml"
        self._config.write_text(_CONFIG.format(endpoint=endpoint))
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SHARDCACHE_", "AWS_"))
        }
        self._env = kept | _ENV

    async def write(self, images: Path) -> Json:
        """Run `shardcache write`; return its summary."""
        command = ["shardcache", "write", images, f"s3://{_BUCKET}"]
        command += ["--classes", "--shuffle=0", f"--shard-size={_SHARD_SIZE}"]
        command += [f"--config={self._config}", "--json"]
        await self._job("write", command)
        summary: Json = json.loads(self._log("write").read_text().splitlines()[-1])
        return summary

    @asynccontextmanager
    async def daemon(self) -> AsyncIterator[None]:
        """Run `shardcache serve` on an empty cache.

        The daemon is ready when the context is entered.
        """
        import asyncio

        command = ["shardcache", "serve", f"--config={self._config}", f"--socket={self._socket}"]
        command += [f"--cache-dir={self._folder / 'cache'}", "--capacity=1GB", "--min-free=0"]
        async with self._running("daemon", command, {}) as process:
            while True:
                if process.returncode is not None:
                    raise self._failure("daemon", "the daemon did not start")
                try:
                    await self.status()
                    break
                except NoDaemonError:  # not listening yet
                    with suppress(TimeoutError):
                        await asyncio.wait_for(process.wait(), _TRY_AGAIN_S)
            yield

    async def train(
        self,
        urls: str,
        name: str,
        job: str,
        *,
        seed: int,
        ranks: int = _RANKS,
        stop_after: int | None = None,
    ) -> list[Any]:
        """Run a training job, from its checkpoint if there is one; return each rank's report.

        Args:
            urls: of the dataset.
            name: of this run: its log, and the folder of its reports.
            job: has one checkpoint for all of its runs.
            seed: of the shuffle.
            ranks: number of processes.
            stop_after: number of batches of the last epoch after which the job writes its
                checkpoint and stops; None to read to the end.
        """
        reports = self._folder / name
        reports.mkdir()
        program = Path(__file__).with_name("demo_training.py")
        command: list[Any] = ["torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        command += [f"--nproc-per-node={ranks}", program, urls, f"--job={job}", f"--seed={seed}"]
        command += [f"--epochs={_EPOCHS}", f"--reports={reports}"]
        command += [f"--checkpoint={self._folder / job}.pt"]
        if stop_after is not None:
            command.append(f"--stop-after={stop_after}")
        await self._job(name, command)
        return [json.loads((reports / f"rank-{rank}.json").read_text()) for rank in range(ranks)]

    async def status(self) -> Json:
        """Return the daemon's status page."""
        return await common.in_thread(AdminClient(self._socket).status)

    async def _job(self, name: str, command: list[Any]) -> None:
        """Run a command to its end. What it reads through the daemon needs no credentials."""
        env = {SOCKET_ENV: str(self._socket), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
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
        """Run a Python module; when the context exits, its process has ended."""
        import asyncio

        with self._log(name).open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                *map(str, command),
                env=self._env | env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C reaches only the demo, which then stops its processes in order.
                start_new_session=True,
            )
        try:
            yield process
        finally:
            try:
                if process.returncode is None:
                    process.terminate()
                    with suppress(TimeoutError):
                        await asyncio.wait_for(process.wait(), _GRACE_S)
            finally:
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    await process.wait()

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _failure(self, name: str, message: str) -> ShardcacheError:
        tail = self._log(name).read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return ShardcacheError("\n    ".join([f"{message}; the end of its log:", *tail]))
