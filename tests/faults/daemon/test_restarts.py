"""The daemon goes and comes back while jobs read: no sample is lost, and none comes twice."""

import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from campaign import restarts
from campaign.harness import QUICK, Row, rows
from shardcache.errors import CapacityError, NoDaemonError, NotAllowedError
from shardcache.shared.lists.shard_columns import Shards
from shardcache.shared.protocol import ShardRef, written
from shardcache_client.daemon.choice import DaemonChoice
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.patience import Outage
from shardcache_client.daemon.session import resolve
from shardcache_client.dataset import ShardDataset
from shardcache_client.files.paths import open_cached
from support.cases import first_quick
from support.network.peer import Peer, scripted
from support.programs.daemon import Daemon, eventually
from support.programs.guard import GUARD_S
from support.shards.tars import write_shards

SHARDS = 4
SAMPLES = 5
KEYS = [f"{number:06d}" for number in range(SHARDS * SAMPLES)]


@pytest.fixture(scope="module")
def read_on() -> Iterator[restarts.Ground]:
    """A store, a daemon and a job; a path short enough for sockets."""
    with (
        tempfile.TemporaryDirectory(prefix="shardcache-r-") as name,
        restarts.ground(Path(name), QUICK) as ground,
    ):
        yield ground


@rows(restarts.ROWS)
def test_jobs_read_the_same_however_often_the_daemon_goes(
    row: Row, read_on: restarts.Ground
) -> None:
    """Every epoch is an undisturbed job's, though the daemon is killed, replaced or frozen."""
    row.check(read_on)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with four shards, and a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="shardcache-r-") as name:
        write_shards(Path(name), SHARDS, SAMPLES, {"bin": 20_000})
        yield Path(name)


@contextmanager
def replaced_by(
    folder: Path, *flags: str, capacity: str = "1GB"
) -> Iterator[tuple[list[str], Iterator[str]]]:
    """Have a reader come into its second shard, and another daemon take the place of its own.

    Yields the keys that were read, and those to come.
    """
    with Daemon(folder) as daemon:
        urls = f"file://{folder}/shard-{{000000..{SHARDS - 1:06d}}}.tar"
        dataset = ShardDataset(urls, socket=daemon.socket, timeout_s=GUARD_S, partial_reads=False)
        keys = (sample["__key__"] for sample in dataset)
        read = [next(keys) for _ in range(SAMPLES + 1)]
    with Daemon(folder, *flags, capacity=capacity):
        yield read, keys


@pytest.mark.slow
@pytest.mark.parametrize("end", first_quick([Daemon.kill, Daemon.stop]))
def test_reader_created_during_a_restart_waits_for_the_next_daemon(
    end: Callable[[Daemon], object], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Datasets and files are there once another daemon starts, however the last one ended."""
    urls = [f"file://{path}" for path in sorted(folder.glob("*.tar"))]
    with Daemon(folder) as daemon, ThreadPoolExecutor() as threads:
        end(daemon)
        creating = threads.submit(ShardDataset, urls, socket=daemon.socket, timeout_s=GUARD_S)
        opening = threads.submit(open_cached, urls[0], socket=daemon.socket, timeout_s=GUARD_S)
        eventually(
            lambda: (
                caplog.text.count("retrying for up to") == 2 or creating.done() or opening.done()
            )
        )
        daemon.start()
        assert [sample["__key__"] for sample in creating.result()] == KEYS
        with opening.result() as file:
            assert file.read() == Path(urls[0].removeprefix("file://")).read_bytes()


def test_reader_without_any_daemon_fails_at_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A reader waits only where a daemon was lately; elsewhere the path is a mistake."""
    os.utime(folder, (0, 0))
    with pytest.raises(NoDaemonError, match="no daemon listens"):
        ShardDataset(
            f"file://{folder}/shard-000000.tar", socket=folder / "s.sock", timeout_s=GUARD_S
        )
    assert "retrying" not in caplog.text


@pytest.mark.slow
def test_a_daemon_that_may_not_fetch_this_says_so(folder: Path) -> None:
    """The error of a reader names the url and whom to ask if --allow became narrower."""
    with replaced_by(folder, "--allow", "s3://elsewhere/") as (read, keys):
        read += [next(keys) for _ in range(SAMPLES - 1)]
        with pytest.raises(NotAllowedError, match="shard-00000") as caught:
            next(keys)
    assert read == KEYS[: 2 * SAMPLES]
    assert "--allow" in caught.value.remedy


@pytest.mark.slow
def test_a_daemon_too_small_for_this_says_so(folder: Path) -> None:
    """The error has both sizes if the capacity became smaller than a shard."""
    with replaced_by(folder, "--cache-dir", str(folder / "other"), capacity="70kB") as (read, keys):
        read += [next(keys) for _ in range(SAMPLES - 1)]
        with pytest.raises(CapacityError, match="shard-000002"):
            next(keys)
    assert read == KEYS[: 2 * SAMPLES]


def test_readers_come_back_spread_out() -> None:
    """Readers that lose a daemon together retry at different moments, within two seconds."""
    outages = [Outage(NoDaemonError("gone", url="s.sock"), begun_s=0.0) for _ in range(256)]
    for bound_s in (0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0):
        pauses = sorted(outage.draw_s() for outage in outages)
        assert pauses[0] >= 0
        assert pauses[-1] <= bound_s
        assert pauses[64] < 0.5 * bound_s < pauses[192]
    assert not outages[0].pause(deadline_s=0.0, tried_s=0.0), "it is over"


def test_a_job_that_starts_during_a_restart_waits_for_it(tmp_path: Path) -> None:
    """A manifest asked of a daemon that is stopping, or dies of it, is asked of the next one."""

    def stopping(peer: Peer) -> None:
        peer.welcome()
        peer.hear()
        peer.websocket.close(1001)

    def dies(peer: Peer) -> None:
        peer.welcome()

    def answers(peer: Peer) -> None:
        peer.welcome()
        packed = Shards.of([ShardRef("s3://bucket/0.tar")]).packed
        peer.websocket.send(
            written({"type": "manifest", "id": peer.hear()["id"], "packed": packed})
        )
        peer.stay()

    with scripted(tmp_path / "s.sock", stopping, dies, answers):
        (shard,) = resolve(
            DaemonChoice(tmp_path / "s.sock"), ReaderIdentity("job"), ["s3://bucket/"], 60
        )
    assert shard.url == "s3://bucket/0.tar"
