"""The page cache follows the plan."""

from __future__ import annotations

from pathlib import Path

from shardcache.store.disk.page_cache import let_go
from support.disks.resident import resident_bytes
from support.programs.daemon import Daemon, eventually
from support.programs.raw_session import RawSession
from support.shards.tars import write_shards


def test_the_next_shard_is_in_memory_before_it_is_asked_for(tmp_path: Path) -> None:
    """While the first is read, the second comes from the disk into memory; the third, which is later, does not."""
    (tmp_path / "data").mkdir()
    urls = [f"file://{path}" for path in write_shards(tmp_path / "data", 3, 20, {"bin": 100_000})]
    with Daemon(tmp_path) as daemon, RawSession(daemon) as session:
        paths: list[Path] = []
        for number in range(3):  # in plans of one shard, so that nothing is brought in ahead
            session.plan(urls, [number])
            leased = session.take(0)
            session.send(type="release", lease=leased["lease"])
            paths.append(Path(leased["path"]))
        for path in paths:
            let_go(path)
        _, second, third = paths
        assert resident_bytes(second) == 0
        session.plan(urls, [0, 1, 2])
        session.take(0)
        eventually(lambda: resident_bytes(second) >= second.stat().st_size)
        assert resident_bytes(third) == 0
