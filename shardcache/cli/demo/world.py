"""The demo's steps and its processes: an S3 server, a daemon and training jobs, each stopped when its context exits."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardcache.cli.admin_client import AdminClient
from shardcache.cli.demo import images
from shardcache.cli.demo.outcome import Dataset, Epoch, Outcome, epochs_of
from shardcache.cli.event_loop import in_thread
from shardcache.errors import NoDaemonError, ShardcacheError
from shardcache.protocol import SOCKET_ENV

BUCKET = "shapes"
_INDEX = "index.json"
RANKS = 2
EPOCHS = 2

_TRAIN = Path(__file__).with_name("train.py")
_CREDENTIALS = {"aws_access_key_id": "demo", "aws_secret_access_key": "demo"}
_REGION = "us-east-1"
_GRACE_S = 10
_TRY_AGAIN_S = 0.05
_LOG_LINES = 60


@contextmanager
def s3_server() -> Iterator[str]:
    """Serve S3 with an empty bucket from this process's memory; yield its endpoint."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # no log line per request
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        with _client(endpoint) as s3:
            s3.create_bucket(Bucket=BUCKET)
        yield endpoint
    finally:
        server.stop()


def upload(endpoint: str, objects: Mapping[str, bytes]) -> None:
    """Put objects, given by name, into the bucket."""
    with _client(endpoint) as s3:
        for name, body in objects.items():
            s3.put_object(Bucket=BUCKET, Key=name, Body=body)


@contextmanager
def _client(endpoint: str) -> Iterator[Any]:
    import boto3

    s3 = boto3.client("s3", endpoint_url=endpoint, region_name=_REGION, **_CREDENTIALS)
    try:
        yield s3
    finally:
        s3.close()


@dataclass(frozen=True, slots=True)
class Run:
    """One start of a training job.

    Attributes:
        name: name of the folder for its reports.
        job: the job, whose checkpoint it resumes from if there is one.
        seed: seed of the job's shuffling and model.
        ranks: number of ranks.
        stop_after: batches of the last epoch after which it writes a checkpoint and stops; None to train to the end.
    """

    name: str
    job: str
    seed: int
    ranks: int = RANKS
    stop_after: int | None = None


@dataclass(frozen=True, slots=True)
class DemoNode:
    """The demo's node: the folder of its daemon's socket, cache and logs."""

    folder: Path

    @property
    def socket(self) -> Path:
        """The daemon's Unix socket."""
        return self.folder / "shardcache.sock"

    @asynccontextmanager
    async def daemon(self, endpoint: str) -> AsyncIterator[None]:
        """Run `shardcache serve` on an empty cache; the daemon is ready when the context is entered."""
        config = self.folder / "shardcache.toml"
        config.touch()  # so that the machine's own config file is not read
        command: list[Any] = ["-P", "-m", "shardcache", "serve", "--config", config, "--socket", self.socket]
        command += ["--cache-dir", self.folder / "cache", "--capacity", "1GB", "--min-free", "0"]
        async with self._running("daemon", command, _store_environment(endpoint)) as process:
            await self._ready(process)
            yield

    async def index(self, urls: str) -> bytes:
        """Run `shardcache index`; return the index that it wrote."""
        path = self.folder / "index.json"
        command = ["-P", "-m", "shardcache", "index", urls, "-o", path, "--relative-to", f"s3://{BUCKET}/"]
        await self._finish("index", command, self._job_environment())
        return path.read_bytes()

    async def train(self, urls: str, run: Run) -> list[Any]:
        """Run a training job until it ends or stops; return each rank's report."""
        reports = self.folder / run.name
        reports.mkdir()
        command: list[Any] = ["-P", "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        command += [f"--nproc-per-node={run.ranks}", _TRAIN, urls, f"--job={run.job}", f"--seed={run.seed}"]
        command += [f"--epochs={EPOCHS}", f"--reports={reports}", f"--checkpoint={self.folder / run.job}.pt"]
        command += [] if run.stop_after is None else [f"--stop-after={run.stop_after}"]
        await self._finish(run.name, command, self._job_environment())
        return [json.loads((reports / f"rank-{rank}.json").read_text()) for rank in range(run.ranks)]

    async def status(self) -> dict[str, Any]:
        """Return the daemon's status page."""
        return await in_thread(AdminClient(self.socket).status)

    async def _ready(self, process: Process) -> None:
        """Return once the daemon answers. Raises ShardcacheError if it ended instead."""
        while process.returncode is None:
            try:
                await self.status()
                return
            except NoDaemonError:  # not listening yet
                with suppress(TimeoutError):
                    async with asyncio.timeout(_TRY_AGAIN_S):
                        await process.wait()
        raise self._failure("daemon", "the daemon did not start")

    def _job_environment(self) -> dict[str, str]:
        # No AWS variables: a job that reads through the daemon needs no credentials.
        return _clean_environment() | {
            SOCKET_ENV: str(self.socket),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }

    async def _finish(self, name: str, command: list[Any], env: dict[str, str]) -> None:
        async with self._running(name, command, env) as process:
            if await process.wait():
                raise self._failure(name, f"{name} failed with exit code {process.returncode}")

    @asynccontextmanager
    async def _running(self, name: str, command: list[Any], env: dict[str, str]) -> AsyncIterator[Process]:
        with self._log(name).open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *map(str, command),
                env=env,
                stdin=DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches only the demo, which then stops its processes in order
            )
        try:
            yield process
        finally:
            await _stop(process)

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _failure(self, name: str, message: str) -> ShardcacheError:
        tail = self._log(name).read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return ShardcacheError("\n    ".join([f"{message}; the end of its log:", *tail]))


async def _stop(process: Process) -> None:
    if process.returncode is not None:
        return
    try:
        process.terminate()
        async with asyncio.timeout(_GRACE_S):
            await process.wait()
    except TimeoutError:
        pass
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def _clean_environment() -> dict[str, str]:
    """Return this process's environment without variables that point to another daemon or object store."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("SHARDCACHE_", "AWS_"))}


def _store_environment(endpoint: str) -> dict[str, str]:
    return _clean_environment() | {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_DEFAULT_REGION": _REGION,
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "NO_PROXY": "127.0.0.1",
        **{name.upper(): value for name, value in _CREDENTIALS.items()},
    }


async def run(folder: Path, say: Callable[[str], None]) -> Outcome:
    """Run the demo in a folder, and describe each step; return its outcome."""
    node = DemoNode(folder)
    uneven = images.IMAGES_OF_SHARDS
    say(f"creating {len(uneven)} tar shards of {min(uneven)} to {max(uneven)} JPEG images, {sum(uneven)} in total")
    shards = list(images.draw_shards())
    keys = frozenset(key for shard in shards for key in shard.keys)
    dataset = Dataset(keys, len(shards), sum(len(shard.body) for shard in shards))
    with s3_server() as endpoint:
        say(f"uploading them to an S3 server at {endpoint}, and starting a daemon with an empty cache")
        await asyncio.to_thread(upload, endpoint, {shard.name: shard.body for shard in shards})
        async with node.daemon(endpoint):
            pattern = f"s3://{BUCKET}/train-{{0000..{len(shards) - 1:04d}}}.tar"
            say(f"counting their samples: shardcache index '{pattern}' -o {_INDEX}")
            await asyncio.to_thread(upload, endpoint, {_INDEX: await node.index(pattern)})
            say(f"training 2 concurrent jobs from s3://{BUCKET}/{_INDEX}: {RANKS} ranks × 2 workers each;")
            say("the second is stopped midway through its last epoch, and resumes from its checkpoint with 1 rank")
            epochs = await _train(node, f"s3://{BUCKET}/{_INDEX}")
            page = await node.status()
    return Outcome(dataset, tuple(epochs), page["counters"]["origin_bytes"])


async def _train(node: DemoNode, urls: str) -> list[Epoch]:
    # Different seeds, so different orders: one download still serves both.
    runs = {
        "first": [Run("first", "first", seed=0)],
        "second": [Run("second", "second", seed=1, stop_after=8), Run("resumed", "second", seed=1, ranks=1)],
    }
    try:
        async with asyncio.TaskGroup() as group:
            jobs = {job: group.create_task(_in_turn(node, urls, each)) for job, each in runs.items()}
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [epoch for job, reports in jobs.items() for epoch in epochs_of(job, reports.result())]


async def _in_turn(node: DemoNode, urls: str, runs: Sequence[Run]) -> list[list[Any]]:
    return [await node.train(urls, run) for run in runs]
