"""The daemon and its readers are killed in a sample of all places: `make faults` does it in every one."""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from campaign.kills.life import FLAGS, GONE, Death, Story, audit, die_and_recover, look
from campaign.kills.readers import kill_readers
from campaign.kills.stories import fetch
from campaign.result import Result
from shardcache.store.folder import PART
from support.disks.shim import HAS_CC, Action, Op, Shim
from support.programs.daemon import Daemon, eventually
from support.programs.processes import transport_workers
from support.programs.zygote import Zygote

pytestmark = pytest.mark.skipif(not HAS_CC, reason="the shim needs a C compiler")


DEATHS = [
    ("first start", Death(Action.KILL_BEFORE, 200)),
    ("fetch", Death(Action.KILL_BEFORE, 130)),
    ("fetch", Death(Action.KILL_HALF, 60)),
    ("fetch from S3", Death(Action.KILL_BEFORE, 140)),
    ("resume and evict", Death(Action.KILL_BEFORE, 110)),
    ("resume and evict", Death(Action.KILL_HALF, 50)),
    ("verify, evict, count", Death(Action.KILL_BEFORE, 70)),
    ("resume and evict", Death(Action.KILL_AFTER, 120, again=60)),
]


@pytest.mark.parametrize(("name", "death"), DEATHS, ids=lambda value: str(getattr(value, "at", value)))
def test_a_daemon_that_is_killed_loses_nothing_published(
    name: str, death: Death, zygote: Zygote, told: dict[str, Story], tmp_path: Path
) -> None:
    """Published shards are served and not fetched again, parts are used, no byte is miscounted, nothing lies about."""
    result = Result("kills", name)
    die_and_recover(zygote, told[name], death, tmp_path / "d", result)
    assert result.passed, result.first_failure


def test_the_audit_notices_what_is_wrong(zygote: Zygote, told: dict[str, Story], tmp_path: Path) -> None:
    """A shard lost, a byte changed, a file that nobody counts: each shows, so that their absence means something."""
    story = told["verify, evict, count"]
    assert story.template is not None
    shutil.copytree(story.template, tmp_path / "cache")
    found = look(tmp_path / "cache", story.source)
    with Daemon(tmp_path, *FLAGS, env=story.source.env, spawn=zygote.spawn) as daemon:
        lost = min(found.published)
        lost.rename(tmp_path / "aside")
        (daemon.cache_dir / "shards" / "00" / "stray.idx").write_bytes(b"x")
        kinds = {kind for kind, _ in audit(daemon, story.source, found)}
    assert kinds == {"lost", "wrong"}


def test_readers_that_are_killed_leave_no_lease(zygote: Zygote, told: dict[str, Story], tmp_path: Path) -> None:
    """Killed anywhere in their work, with several shards in hand, their sessions and leases are gone with them."""
    result = kill_readers(zygote, told["fetch"].source, tmp_path / "r", 4)
    assert result.passed, result.first_failure
    assert len(result.recovery_s) == 1


def test_a_transport_worker_dies_with_its_daemon(zygote: Zygote, told: dict[str, Story], tmp_path: Path) -> None:
    """The next daemon may write the same files: killed while a part is written, none leaves a writer behind."""
    source, shim = told["fetch from S3"].source, Shim(tmp_path / "shim", tmp_path / "cache")
    env = source.env | {"SHIM_CONTROL": str(shim.path)}
    with Daemon(tmp_path, *FLAGS, env=env, spawn=zygote.spawn) as daemon:
        pid = daemon.pid
        eventually(lambda: bool(transport_workers(pid)))
        workers = [os.pidfd_open(worker) for worker in transport_workers(pid)]
        shim.arm(Action.KILL_HALF, at=2, ops=(Op.WRITE,), match=PART)  # only workers write parts
        with pytest.raises(GONE):
            fetch(daemon, source)
        assert daemon.wait() == -signal.SIGKILL and shim.acted == 1
    for worker in workers:
        ended, _, _ = select.select([worker], [], [], 60)
        os.close(worker)
        assert ended


@pytest.mark.parametrize("is_at_work", [True, False], ids=["at work", "just begun"])
async def test_an_indexer_dies_with_its_daemon(is_at_work: bool, tmp_path: Path) -> None:
    """The next daemon may index the same shard: the file under its name must not be an orphan's any more."""
    tar = tmp_path / "endless.tar"  # reading it waits for bytes that never come
    os.mkfifo(tar)
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout
    indexer = os.pidfd_open(int(await parent.stdout.readline()))
    writers: list[int] = []
    try:
        if is_at_work:
            await asyncio.to_thread(eventually, lambda: _is_read(tar, writers))
        parent.kill()
        await parent.wait()
        ended, _, _ = await asyncio.to_thread(select.select, [indexer], [], [], 60)
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
from shardcache.store.indexers import Indexers
from shardcache.store.indexing import IndexRequest

async def main():
    folder, indexers = pathlib.Path(sys.argv[1]), Indexers(1)
    await indexers.prepare()
    print(indexers._idle[0].pid, flush=True)
    await indexers.index(IndexRequest(str(folder / "endless.tar"), str(folder / "x.idx"), {}, "url", True, 0))

asyncio.run(main())
"""
