"""Indexing processes: replaced when they die, gone when the daemon is."""

import asyncio
import os
import resource
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from shardcache.errors import CacheError, DiskError, NotATarError, UnsupportedShardError
from shardcache.shared.formats.memory_limit import MAX_MEMORY_BYTES
from shardcache.store.indexing import indexer
from shardcache.store.indexing.indexer import IndexRequest, TokensRequest
from shardcache.store.indexing.indexers import Indexers
from support.programs.daemon import eventually
from support.programs.processes import running
from support.shards.tars import make_tar, random_samples

SILENCE_S = 2.0
ENOUGH_FOR_A_TAR_BYTES = 128 * 1024**2


@pytest.fixture
async def indexers() -> AsyncIterator[Indexers]:
    started = Indexers(1)
    yield started
    await started.close()


@pytest.fixture
async def pair() -> AsyncIterator[Indexers]:
    started = Indexers(2, silence_s=SILENCE_S)
    yield started
    await started.close()


def processes() -> set[int]:
    """Return the indexing processes of this one, some of which other tests may have left."""
    return running(os.getpid(), indexer.__name__)


def request_for(tar: Path, allowed_bytes: int = 10**6) -> IndexRequest:
    header = {"size_bytes": tar.stat().st_size}
    return IndexRequest(
        str(tar), str(tar.with_suffix(".idx")), header, f"file://{tar}", True, allowed_bytes
    )


async def test_error_keeps_its_type_and_the_process_continues(
    indexers: Indexers, tmp_path: Path
) -> None:
    """A fault of one shard is no reason to start another process."""
    tar = tmp_path / "a.tar"
    tar.write_bytes(b"no tar at all" * 100)
    with pytest.raises(NotATarError) as caught:
        await indexers.index(request_for(tar))
    assert caught.value.url == f"file://{tar}"
    before = processes()
    tar.write_bytes(make_tar(random_samples(3)))
    assert (await indexers.index(request_for(tar))).samples == 3
    assert processes() == before


async def test_unforeseen_error_is_reported_as_what_it_is(
    indexers: Indexers, tmp_path: Path
) -> None:
    """A fault of the program, here from an invalid request, is no lack of memory."""
    tar = tmp_path / "a.tar"
    tar.write_bytes(make_tar(random_samples(3)))
    with pytest.raises(CacheError, match=r"an unexpected error \(TypeError: ") as caught:
        await indexers.index(replace(request_for(tar), header=cast(Any, ["no facts"])))
    assert caught.value.url == f"file://{tar}"
    assert (await indexers.index(request_for(tar))).samples == 3


async def test_unforeseen_error_names_the_task(indexers: Indexers, tmp_path: Path) -> None:
    """An error in counting tokens does not say that the shard could not be indexed."""
    request = TokensRequest(
        str(tmp_path / "a.tar"), str(tmp_path / "a.idx"), "file:///a.tar", cast(Any, 7)
    )
    with pytest.raises(
        CacheError, match="counting the tokens of the shard failed with an unexpected"
    ):
        await indexers.count_tokens(request)


@pytest.mark.parametrize(("missing", "kept"), [("a.tar", "a.idx"), ("a.idx", "a.tar")])
async def test_disk_error_names_the_file_that_caused_it(
    indexers: Indexers, tmp_path: Path, missing: str, kept: str
) -> None:
    """Both the shard and its sidecar are read or written, and either may be what fails."""
    tar = tmp_path / "a.tar"
    tar.write_bytes(make_tar(random_samples(3)))
    indexing = request_for(tar)
    await indexers.index(indexing)
    counting = TokensRequest(indexing.shard_path, indexing.sidecar_path, indexing.url, "npy")
    (tmp_path / missing).unlink()
    with pytest.raises(DiskError) as caught:
        await indexers.count_tokens(counting)
    assert missing in caught.value.message
    assert kept not in caught.value.message

    if missing == "a.idx":
        (tmp_path / "a.idx").mkdir()
    with pytest.raises(DiskError) as caught:
        await indexers.index(indexing)
    assert missing in caught.value.message
    assert kept not in caught.value.message


async def test_process_has_no_credentials(
    indexers: Indexers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It opens local files alone; everything else in its environment is the daemon's."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret")
    monkeypatch.setenv("HF_TOKEN", "the-secret")
    monkeypatch.setenv("ANOTHER", "the-other")
    tar = tmp_path / "a.tar"
    tar.write_bytes(make_tar(random_samples(3)))
    others = processes()
    await indexers.index(request_for(tar))
    (pid,) = processes() - others
    environment = Path(f"/proc/{pid}/environ").read_bytes()
    assert b"the-secret" not in environment
    assert b"the-other" in environment


async def test_process_that_needs_too_much_memory_says_so_and_continues(
    indexers: Indexers, tmp_path: Path
) -> None:
    """Its memory is limited, so that no shard can take the node's (lowered here for speed)."""
    lines = tmp_path / "a.jsonl"
    tar = tmp_path / "a.tar"
    lines.write_bytes(b'{"a": [' + b"{}, " * 4_000_000 + b"{}]}")
    tar.write_bytes(make_tar(random_samples(3)))
    others = processes()
    await indexers.index(request_for(tar))
    (pid,) = processes() - others
    assert resource.prlimit(pid, resource.RLIMIT_DATA) == (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES)

    resource.prlimit(pid, resource.RLIMIT_DATA, (ENOUGH_FOR_A_TAR_BYTES, ENOUGH_FOR_A_TAR_BYTES))
    with pytest.raises(UnsupportedShardError, match="4 GiB of memory") as caught:
        await indexers.index(request_for(lines))
    assert caught.value.url == f"file://{lines}"
    assert (await indexers.index(request_for(tar))).samples == 3
    assert processes() - others == {pid}


async def test_a_cancelled_request_spoils_no_later_one(indexers: Indexers, tmp_path: Path) -> None:
    """The answer that nobody waits for any more is never taken for another shard's."""
    large = tmp_path / "large.tar"
    small = tmp_path / "small.tar"
    large.write_bytes(make_tar(random_samples(3000, {"cls": 1})))
    small.write_bytes(make_tar(random_samples(3)))
    asking = asyncio.create_task(indexers.index(request_for(large)))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert (await indexers.index(request_for(small))).samples == 3


@pytest.mark.slow
async def test_frozen_processes_are_killed_and_replaced(pair: Indexers, tmp_path: Path) -> None:
    """With every process stopped, each shard is indexed by a new one; the stopped ones are gone."""
    tars = [tmp_path / "a.tar", tmp_path / "b.tar"]
    for tar in tars:
        tar.write_bytes(make_tar(random_samples(3)))
    others = processes()
    await asyncio.gather(*[pair.index(request_for(tar)) for tar in tars])
    frozen = processes() - others
    assert len(frozen) == len(tars)
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    found = await asyncio.gather(*[pair.index(request_for(tar)) for tar in tars])
    assert [indexed.samples for indexed in found] == [3, 3]
    assert not frozen & processes()


@pytest.mark.slow
async def test_one_shard_needs_one_process_that_is_not_frozen(
    pair: Indexers, tmp_path: Path
) -> None:
    """All idle ones are stopped, and have done nothing yet: the second try is by a new process."""
    tar = tmp_path / "a.tar"
    tar.write_bytes(make_tar(random_samples(3)))
    others = processes()
    await pair.prepare()
    await pair.prepare()
    for pid in processes() - others:
        eventually(lambda pid=pid: takes_requests(pid))
        os.kill(pid, signal.SIGSTOP)
    assert (await pair.index(request_for(tar))).samples == 3


def takes_requests(pid: int) -> bool:
    """Return whether an indexing process has its second thread, which reads its requests."""
    return len(list(Path(f"/proc/{pid}/task").iterdir())) == 2


@pytest.mark.slow
async def test_process_that_works_long_is_not_replaced(tmp_path: Path) -> None:
    """A long wait for a tar is no silence, as it answers pings, and may finish."""
    fifo = tmp_path / "slow.tar"
    os.mkfifo(fifo)
    request = IndexRequest(str(fifo), str(tmp_path / "slow.idx"), {}, f"file://{fifo}", True, 10**6)
    worker = Indexers(1, silence_s=SILENCE_S)
    await worker.prepare()
    before = processes()
    asking = asyncio.create_task(worker.index(request))
    done, _ = await asyncio.wait([asking], timeout=2 * SILENCE_S)
    assert not done
    assert processes() == before
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await worker.close()
