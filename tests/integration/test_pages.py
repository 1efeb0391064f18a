"""The page cache follows the plan."""

from __future__ import annotations

from pathlib import Path

from shardcache.store.pagecache import let_go, resident_bytes
from support.daemon import Daemon, eventually
from support.raw_session import RawSession
from support.tars import write_shards


def test_the_next_shard_is_in_memory_before_it_is_asked_for(tmp_path: Path) -> None:
    """While the first is read, the second comes from the disk into memory; the third, which is later, does not."""
    (tmp_path / "data").mkdir()
    urls = [f"file://{path}" for path in write_shards(tmp_path / "data", 3, 20, {"bin": 100_000})]
    with Daemon(tmp_path) as daemon, RawSession(daemon) as session:
        session.plan(urls, [0, 1, 2])
        eventually(lambda: len(daemon.shards()) == 3)
        by_url = {url: session.ask("lease", position=position) for position, url in enumerate(urls)}
        for leased in by_url.values():
            session.send(type="release", lease=leased["lease"])
        first, second, third = (Path(by_url[url]["path"]) for url in urls)
        for path in (first, second, third):
            let_go(path)
        assert resident_bytes(second) == 0
        session.plan(urls, [0, 1, 2])
        session.ask("lease", position=0)
        eventually(lambda: resident_bytes(second) >= second.stat().st_size)
        assert resident_bytes(third) == 0
