"""ShardDataset when the daemon dies, comes back, is slow or never answers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from shardcache.errors import NoDaemonError, ShardTimeoutError
from shardcache_client import ShardDataset, ignore_and_continue
from support.programs.daemon import Daemon


def test_a_daemon_killed_and_restarted_midway(daemon: Daemon, urls: str, keys: list[str]) -> None:
    """kill -9 and a new daemon cost a reader nothing: the shard in its hands stays, the new one gives the next."""
    samples = iter(ShardDataset(urls, socket=daemon.socket, partial_reads=False))
    read = [next(samples)["__key__"] for _ in range(30)]
    daemon.kill()
    read += [next(samples)["__key__"] for _ in range(20)]
    daemon.start()
    read += [sample["__key__"] for sample in samples]
    assert read == keys


def test_a_restart_while_a_reader_waits(
    daemon: Daemon, urls: str, keys: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A reader that needs its next shard while there is no daemon waits for one, and says so."""
    samples = iter(ShardDataset(urls, socket=daemon.socket))
    read = [next(samples)["__key__"] for _ in range(25)]
    daemon.kill()
    starting = threading.Timer(0.5, daemon.start)
    starting.start()
    try:
        read += [sample["__key__"] for sample in samples]
    finally:
        starting.join()
    assert read == keys
    assert "retrying for up to" in caplog.text


def test_a_restart_under_workers(daemon: Daemon, urls: str, keys: list[str]) -> None:
    """So do DataLoader workers, each by itself."""
    samples = iter(DataLoader(ShardDataset(urls, socket=daemon.socket), batch_size=None, num_workers=2))
    read = [next(samples)["__key__"] for _ in range(10)]
    daemon.restart()
    read += [sample["__key__"] for sample in samples]
    assert sorted(read) == keys


def test_a_daemon_that_stays_away(daemon: Daemon, urls: str) -> None:
    """Without a daemon the mapped shard is read to its end; then NoDaemonError comes when the time is over."""
    samples = iter(ShardDataset(urls, socket=daemon.socket, timeout_s=3, partial_reads=False))
    for _ in range(5):
        next(samples)
    daemon.kill()
    try:
        for _ in range(20):
            next(samples)
        with pytest.raises(NoDaemonError, match="no daemon listens"):
            next(samples)
    finally:
        daemon.start()


def test_a_stopping_daemon_does_not_wait_for_readers(daemon: Daemon, urls: str, keys: list[str]) -> None:
    """SIGTERM ends a daemon whose readers are busy elsewhere, in order; they go on with the next."""
    ds = ShardDataset(urls, socket=daemon.socket)
    samples = iter(ds)
    read = [next(samples)["__key__"] for _ in range(5)]
    assert daemon.stop() == 0
    daemon.start()
    assert read + [sample["__key__"] for sample in samples] == keys


@contextmanager
def silent_server() -> Iterator[str]:
    """Accept connections and never say a word; yields the url."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_store_that_does_not_answer(daemon: Daemon, folder: Path) -> None:
    """The error names shard, cause and remedy; who goes on without the shard reads the others."""
    good = folder / "source" / "shard-000000.tar"
    with silent_server() as url:
        shard = f"{url}/stalled.tar"
        with pytest.raises(ShardTimeoutError) as caught:
            list(iter(ShardDataset([shard], socket=daemon.socket, timeout_s=3)))
        ds = ShardDataset([shard, f"file://{good}"], socket=daemon.socket, timeout_s=3, on_error=ignore_and_continue)
        assert len(list(iter(ds))) == 25
    assert caught.value.url == shard
    assert "asking the object store" in caught.value.message
    assert "timeout_s" in caught.value.remedy
