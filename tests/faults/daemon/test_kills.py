"""The daemon and its readers are killed, and power is cut, at sampled places of `make faults`."""

import asyncio
import os
import random
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from campaign import kills, power
from campaign.disk_model import BLOCK_BYTES, Chance, Content, File
from campaign.harness import Result, Row, rows
from campaign.kill_audit import audit, look
from campaign.kill_stories import fetch
from campaign.lives import FLAGS, GONE, Ground
from shardcache.store.folder.layout import PART
from support.disks.shim import HAS_CC, Action, Op, Shim
from support.programs.daemon import Daemon, eventually
from support.programs.processes import has_ended, transport_workers
from support.programs.zygote import Zygote
from support.stores.buckets import MotoS3

pytestmark = pytest.mark.skipif(not HAS_CC, reason="the shim needs a C compiler")


@pytest.fixture(scope="module")
def lived(
    zygote: Zygote, moto_server: MotoS3, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ground]:
    """The stories, and a folder for the lives that follow them."""
    with kills.told(zygote, moto_server, tmp_path_factory.mktemp("k")) as field:
        yield field


@pytest.mark.slow
@rows(kills.ROWS)
def test_killed_daemon_loses_nothing_published(row: Row, lived: Ground) -> None:
    """Published shards are not fetched again, parts are used, and no byte is miscounted."""
    row.check(lived)


@pytest.mark.slow
def test_audit_notices_what_is_wrong(lived: Ground, tmp_path: Path) -> None:
    """A lost shard, a changed byte and a stray file all show, so a clean audit means a lot."""
    story = lived.stories["verify, evict, count"]
    assert story.template is not None
    shutil.copytree(story.template, tmp_path / "cache")
    found = look(tmp_path / "cache", story.source)
    with Daemon(tmp_path, *FLAGS, env=story.source.env, spawn=lived.zygote.spawn) as daemon:
        lost = min(found.published)
        lost.rename(tmp_path / "aside")
        (daemon.cache_dir / "shards" / "00" / "stray.idx").write_bytes(b"x")
        kinds = {kind for kind, _ in audit(daemon, story.source, found)}
    assert kinds == {"lost", "wrong"}


@pytest.mark.slow
def test_transport_worker_dies_with_its_daemon(lived: Ground, tmp_path: Path) -> None:
    """The next daemon may write the same files, so none leaves a writer behind when killed."""
    source = lived.stories["fetch from S3"].source
    shim = Shim(tmp_path / "shim", tmp_path / "cache")
    env = source.env | {"SHIM_CONTROL": str(shim.path)}
    with Daemon(tmp_path, *FLAGS, env=env, spawn=lived.zygote.spawn) as daemon:
        pid = daemon.pid
        eventually(lambda: bool(transport_workers(pid)))
        workers = [os.pidfd_open(worker) for worker in transport_workers(pid)]
        shim.arm(Action.KILL_HALF, at=2, ops=(Op.WRITE,), match=PART)  # only workers write parts
        with pytest.raises(GONE):
            fetch(daemon, source)
        assert daemon.wait() == -signal.SIGKILL
        assert shim.acted == 1
    for worker in workers:
        ended = has_ended(worker)
        os.close(worker)
        assert ended


async def test_indexer_dies_with_its_daemon(tmp_path: Path) -> None:
    """The next daemon may index the same shard, and an orphan must not hold its file."""
    tar = tmp_path / "endless.tar"  # reading it waits for bytes that never come
    os.mkfifo(tar)
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout
    indexer = os.pidfd_open(int(await parent.stdout.readline()))
    writers: list[int] = []
    try:
        await asyncio.to_thread(eventually, lambda: _is_read(tar, writers))
        parent.kill()
        await parent.wait()
        ended = await asyncio.to_thread(has_ended, indexer)
        assert ended
    finally:
        for fd in (indexer, *writers):
            os.close(fd)


def _is_read(fifo: Path, writers: list[int]) -> bool:
    with suppress(OSError):  # nobody has it open
        writers.append(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
    return bool(writers)


PARENT = """
import asyncio, pathlib, sys
from shardcache.store.indexing.indexers import Indexers
from shardcache.store.indexing.indexer import IndexRequest

async def main():
    folder, indexers = pathlib.Path(sys.argv[1]), Indexers(1)
    await indexers.prepare()
    print(indexers._idle[0].pid, flush=True)
    shard, sidecar = str(folder / "endless.tar"), str(folder / "x.idx")
    await indexers.index(IndexRequest(shard, sidecar, {}, "url", True, 0))

asyncio.run(main())
"""


@pytest.mark.slow
@rows(power.ROWS)
def test_power_cut_leaves_only_right_shards_visible(row: Row, lived: Ground) -> None:
    """Visible shards and parts are right, and flushed shards there, whatever reached the disk."""
    row.check(lived)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".part", ".idx"])
def test_missing_flush_would_be_noticed(suffix: str, lived: Ground, tmp_path: Path) -> None:
    """Some state would show a missing flush of tars or sidecars, so the test can fail."""
    story = lived.stories["fetch"]
    result = Result("a power cut without a flush")
    record = power.Record.of(lived.zygote, story, tmp_path / "p")
    careless = [
        call for call in record.calls if not (call.op is Op.FSYNC and call.path.endswith(suffix))
    ]
    power.examine(lived.zygote, story, replace(record, calls=careless), result, step=37, daemons=0)
    assert result.wrong


@pytest.mark.slow
def test_part_with_other_bytes_would_be_noticed(lived: Ground, tmp_path: Path) -> None:
    """Wrong parts are in the states, beside right ones, and one that is granted shows."""
    story = lived.stories["ranges, evicted"]
    record = power.Record.of(lived.zygote, story, tmp_path / "p")
    others = {url: tar[::-1] for url, tar in story.source.tars.items()}
    wrong = replace(story, source=replace(story.source, tars=others))
    result = Result("a power cut that leaves the parts of other objects")
    examiner = power.examine(lived.zygote, wrong, record, result, step=53, daemons=0)
    assert examiner.damaged
    assert examiner.sound
    assert result.wrong >= examiner.sound


def test_power_cut_leaves_a_hole_or_what_was_there() -> None:
    """Of each block for itself, until the file is flushed; the file keeps its size."""
    data = b"".join(bytes([number]) * BLOCK_BYTES for number in range(1, 5))
    file = File.known(Content(data, frozenset(range(4))))
    file.punch(BLOCK_BYTES, 2 * BLOCK_BYTES + 10)
    left = [file.after(Chance(random.Random(seed))) for seed in range(100)]
    assert {len(content.data) for content in left} == {len(data)}
    present = [file.data[number * BLOCK_BYTES :][:BLOCK_BYTES] for number in range(4)]
    assert present[1:3] == [bytes(BLOCK_BYTES)] * 2
    assert present[3] == bytes(10) + data[3 * BLOCK_BYTES + 10 :]
    kept = [content.block(1) for content in left if content.block(2) is None]
    assert {None, data[BLOCK_BYTES:][:BLOCK_BYTES]} <= set(kept)
    file.flush()
    assert file.after(Chance(random.Random(0))) == Content(bytes(file.data), frozenset({0, 3}))
