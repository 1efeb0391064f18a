"""An object is fetched whole in few requests after some of its ranges, too."""

import random
from pathlib import Path

from shardcache_client.files.filesystem import ShardcacheFileSystem
from shardcache_client.files.paths import cached_paths
from support.programs.daemon import Daemon
from support.programs.guard import GUARD_S
from support.stores.canary import Canary

MIB = 1024 * 1024
BODY = random.Random(5).randbytes(16 * MIB)


def test_small_parts_are_fetched_several_at_a_time(tmp_path: Path) -> None:
    """Also while a reader waits for the whole object. A request for each part takes a round trip.

    By default, these parts have 256 KiB, and those of other objects 8 MiB.
    """
    with Canary() as store, Daemon(tmp_path, "--shard-connections", "2") as node:
        url = store.put("weights", BODY)
        files = ShardcacheFileSystem("http", socket=str(node.socket), skip_instance_cache=True)
        with files.open(url) as file:
            file.seek(5 * MIB)
            assert file.read(100) == BODY[5 * MIB : 5 * MIB + 100]

        with cached_paths(url, socket=node.socket, timeout_s=GUARD_S) as (path,):
            assert Path(path).read_bytes() == BODY

        assert store.asked_bytes() == len(BODY)
        sizes = [stop - start for start, stop in store.ranges()]
        assert len(sizes) <= 8
        assert max(sizes) <= 4 * MIB
