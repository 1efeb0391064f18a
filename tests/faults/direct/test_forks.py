"""Processes that are forked while their parent reads from the store by itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.programs.guard import GUARD_S
from support.shards.tars import make_tar, random_samples
from support.stores.buckets import Bucket

# In a process of its own, for the threads of this one's servers end and take locks as they please.
_FORKING = """
import json, os, ssl, sys, threading, traceback

def look():  # registered first, this runs last before the fork
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if thread.name == "shardcache-direct" and frames[thread.ident].f_code.co_name != "wait":
            at_work.add("the loop")
        elif thread.name.startswith("shardcache-direct_"):  # it may still wake the loop, by a byte to a socket
            files = [frame.f_code.co_filename for frame, _ in traceback.walk_stack(frames[thread.ident])]
            at_work.update(file for file in files if "/shardcache/" in file)

def ours():
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("shardcache-direct")]
    return {thread.ident for thread in threads} - {None}  # which stands for one that is being started

def child():
    first_use = threading.Thread(target=ssl.SSLContext, args=(ssl.PROTOCOL_TLS_CLIENT,), daemon=True)
    first_use.start()
    first_use.join(10)
    os._exit(first_use.is_alive())

os.register_at_fork(before=look)
from shardcache.direct.service import Direct
from shardcache.protocol import ShardRef

Direct().resolve([sys.argv[1]], 60)  # what is slow at first is done: a fork waits some seconds, and no longer
at_work, ended, hung = set(), set(), 0
for _ in range(int(sys.argv[2])):
    direct = Direct()
    [ref] = direct.resolve([sys.argv[1]], 60)
    fetch, before = direct.fetch(ref), ours()
    pid = os.fork() or child()
    hung += os.waitpid(pid, 0)[1] != 0
    assert fetch.wait(60) is not None
    direct.close()
    ended |= before - ours()
print(json.dumps({"hung": hung, "ended": len(ended), "at_work": sorted(at_work)}))
"""


@pytest.fixture
def url(moto: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The url of a shard that this process's children may fetch into a folder of the test's."""
    monkeypatch.setenv("SHARDCACHE_DIRECT_DIR", str(tmp_path))
    monkeypatch.setenv("SHARDCACHE_MIN_FREE", "0")
    return moto.put("0.tar", make_tar(random_samples(20, {"jpg": 100_000})))


@pytest.mark.parametrize("forks", [5, pytest.param(20, marks=pytest.mark.slow)])
def test_threads_rest_while_the_process_forks(url: str, forks: int) -> None:
    """No thread that reads from the store works or ends at a fork, so none holds a lock that the child would wait for.

    OpenSSL has such a lock, which every thread takes at its first use of it and at its end.
    """
    command = [sys.executable, "-c", _FORKING, url, str(forks)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=GUARD_S, check=True)
    assert json.loads(ran.stdout) == {"hung": 0, "ended": 0, "at_work": []}
