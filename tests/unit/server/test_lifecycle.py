"""Messages to the service manager, and silence without one."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardcache.config.amounts import DiskAmount
from shardcache.server.process.service_notifier import Liveness, ServiceNotifier, liveness
from shardcache.store.folder.cache_folder import CacheFolder
from shardcache.store.store import Store
from support.programs.daemon import eventually
from support.programs.guard import GUARD_S
from support.shards.stores import health_of, open_store

WELL = {"error": None, "silent_s": 0.0}


def test_the_variables_are_taken_out() -> None:
    """The daemon's children may not speak for it, nor is another's watchdog ours."""
    env = {
        "NOTIFY_SOCKET": "/run/n",
        "WATCHDOG_USEC": "6000000",
        "WATCHDOG_PID": "7",
        "PATH": "/bin",
    }
    assert repr(ServiceNotifier.take(dict(env), 7)) == "ServiceNotifier('/run/n', every 2 s)"
    assert repr(ServiceNotifier.take(env, 8)) == "ServiceNotifier('/run/n', every 10 s)"
    assert env == {"PATH": "/bin"}
    notifier = repr(ServiceNotifier.take({"WATCHDOG_USEC": "0"}, 7))
    assert notifier == "ServiceNotifier(None, every 10 s)"


@contextmanager
def manager_at(address: str) -> Iterator[Callable[[], dict[str, str]]]:
    """Listen as a service manager; yield the function that returns the next fields."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind(address.replace("@", "\0", 1))
        ear.settimeout(GUARD_S)
        yield lambda: dict(line.split("=", 1) for line in ear.recv(4096).decode().splitlines())


@pytest.mark.parametrize("form", ["{}/notify", "@{}"], ids=["path", "abstract"])
async def test_only_the_living_feed_the_watchdog(form: str, tmp_path: Path) -> None:
    """One that is dead still says why, whatever is in that, by a socket with a path or without."""
    ways = [Liveness(False, "Hung.\nWATCHDOG=1"), Liveness(True, "Well.")]
    address = form.format(tmp_path)
    with manager_at(address) as hear:
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(
                ServiceNotifier(address, watchdog_s=0.03).watch(lambda: ways[-1])
            )
            assert await asyncio.to_thread(hear) == {"STATUS": "Well.", "WATCHDOG": "1"}
            ways.pop()
            told = await asyncio.to_thread(hear)
            while "WATCHDOG" in told:  # what was said before
                told = await asyncio.to_thread(hear)
            watching.cancel()
        assert told == {"STATUS": "Hung. WATCHDOG=1"}


async def test_a_long_start_asks_for_time(tmp_path: Path) -> None:
    """The manager is told to wait during the search, whose result or error comes through."""
    address = str(tmp_path / "notify")
    with manager_at(address) as hear:
        manager = ServiceNotifier(address, watchdog_s=0.03)
        go_on = threading.Event()
        async with asyncio.TaskGroup() as group:
            work = group.create_task(manager.keep_alive_during("Searching.", go_on.wait))
            told = await asyncio.to_thread(hear)
            go_on.set()
        assert await work is True
        assert told == {"STATUS": "Searching.", "EXTEND_TIMEOUT_USEC": "30000000"}
        with pytest.raises(ZeroDivisionError):
            await manager.keep_alive_during("Searching.", lambda: 1 // 0)
    for deaf in (
        ServiceNotifier(),
        ServiceNotifier(str(tmp_path / "gone")),
        ServiceNotifier("not an address"),
    ):
        await deaf.notify(READY=1)  # nobody hears it, which does no harm


class Hanging(CacheFolder):
    """A folder on a disk that does not answer until it is told to."""

    def __init__(self) -> None:
        self.answers = threading.Event()

    def probe(self) -> bool:
        return not self.answers.wait()


async def test_a_disk_that_hangs_counts_as_silent(tmp_path: Path) -> None:
    """A hang shows as seconds that grow, and ends with the answer; an error is an answer."""
    store = open_store(tmp_path)
    folder = Hanging()
    held = store.folder
    store.folder = folder
    health = health_of(store)
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(health.run())
        await asyncio.to_thread(eventually, lambda: health.to_json()["silent_s"] > 0)
        folder.answers.set()
        await asyncio.to_thread(eventually, lambda: health.to_json()["silent_s"] == 0)
        watching.cancel()
    held.close()
    store.catalogue.close()


def test_a_full_disk_is_alive_and_a_silent_one_is_not(tmp_path: Path) -> None:
    """Restarting helps against a hang alone; the line for people says what is wrong."""
    store = Store.open(tmp_path / "cache", DiskAmount(10**9), DiskAmount())
    try:
        assert liveness(WELL, store, 3) == Liveness(True, "3 readers; 0 shards, 0 Bytes of 1.0 GB.")
        full = liveness(WELL | {"error": {"message": "no space left"}}, store, 0)
        assert full.alive
        assert "no space left" in full.line
        hung = liveness(WELL | {"silent_s": 3600.0}, store, 0)
        assert not hung.alive
        assert "3600 s" in hung.line
    finally:
        store.close()
