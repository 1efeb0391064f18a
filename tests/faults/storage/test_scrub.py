"""Published shards are read again, slowly: a changed byte is found, and nobody is disturbed."""

import asyncio
import ctypes
import mmap
import os
from contextlib import suppress
from pathlib import Path

import pytest

from campaign.disks import SAMPLES, CacheRig, flip
from shardcache.cache.disk_health import DiskHealth
from shardcache.cache.scrubber import Scrubber, ScrubProgress
from shardcache.cache.waiting.signals import Signal
from shardcache.errors import CorruptShardError
from shardcache.store.disk.open_files import own_read_lock
from shardcache.store.folder.layout import Layout
from shardcache.store.shard import Shard
from shardcache.store.store import Store
from shardcache.store.verification import Scrub
from shardcache_client.dataset import ShardDataset
from support.cases import first_quick
from support.programs.daemon import eventually
from support.programs.guard import GUARD_S
from support.shards.stores import PIECE_BYTES, kept_in, open_store, publish

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


def resident_bytes(path: Path) -> int:
    """Return how much of a file is in memory, in bytes of whole pages; 0 if it does not exist.

    The kernel reports the truth only to the file's owner and to users who may write it; to others
    all pages appear resident.
    """
    # A private mapping: ctypes can take the address only of a writable buffer, and the file is
    # read-only.
    with suppress(FileNotFoundError), path.open("rb") as file:
        if os.fstat(file.fileno()).st_size:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapping:
                return _resident_pages(mapping) * mmap.PAGESIZE
    return 0


def _resident_pages(mapping: mmap.mmap) -> int:
    first_byte = ctypes.c_char.from_buffer(mapping)
    pages = ctypes.create_string_buffer(-(-len(mapping) // mmap.PAGESIZE))
    if _libc.mincore(ctypes.addressof(first_byte), len(mapping), pages) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return sum(page & 1 for page in pages.raw)


URL = "s3://bucket/shard.tar"
RATE = 1_000_000_000


def read_all(layout: Layout, shard: Shard) -> int:
    """Scrub a shard to its end; return how many bytes that read."""
    assert shard.facts is not None
    scrub = Scrub(layout.tar(shard.key), layout.sidecar(shard.key), shard.facts)
    while scrub.step():
        pass
    return scrub.read_bytes


class Notes(DiskHealth):
    """Writes down what was found."""

    def __init__(self, store: Store) -> None:
        kept = kept_in(store)
        super().__init__(store, kept.residency, kept.pins, kept.changed)
        self.keys: list[str] = []

    async def take_out(self, shard: Shard, exn: CorruptShardError) -> bool:
        """Note a shard."""
        assert exn.url is not None
        self.keys.append(shard.key)
        return True


async def run_until_the_round_ends(scrub: Scrubber) -> None:
    """Run until no round is under way, and there was one."""
    async with asyncio.timeout(GUARD_S), asyncio.TaskGroup() as group:
        task = group.create_task(scrub.run())
        await asyncio.to_thread(
            eventually, lambda: scrub.to_json()["last_round_ended_at_s"] is not None
        )
        task.cancel()


async def one_round(store: Store, notes: Notes) -> Scrubber:
    """Return a scrubber that has run until a round has ended."""
    scrub = Scrubber(store, notes, kept_in(store).residency.parts, Signal(), RATE, pause_s=3600.0)
    await run_until_the_round_ends(scrub)
    return scrub


@pytest.mark.parametrize(
    "at", first_quick([0, 1, 4095, 4096, PIECE_BYTES - 1, PIECE_BYTES, 3 * PIECE_BYTES + 5, -1], 3)
)
async def test_a_byte_changed_anywhere_is_found(tmp_path: Path, at: int) -> None:
    """At the edges of blocks and pieces, and at both ends of the file."""
    store = open_store(tmp_path)
    shard = await publish(store, URL, samples=200)
    flip(store.layout.tar(shard.key), at % shard.size_bytes)
    with pytest.raises(CorruptShardError, match="damaged near byte") as caught:
        read_all(store.layout, shard)
    assert caught.value.url == URL
    store.close()


async def test_a_file_cut_short_and_a_sidecar_changed_are_found(tmp_path: Path) -> None:
    """Damage that the checksums of the tar do not cover."""
    store = open_store(tmp_path)
    shard = await publish(store, URL, samples=200)
    sidecar = store.layout.sidecar(shard.key)
    tar = store.layout.tar(shard.key)
    flip(sidecar, shard.sidecar_bytes - 1)
    with pytest.raises(CorruptShardError, match="sidecar"):
        read_all(store.layout, shard)
    flip(sidecar, shard.sidecar_bytes - 1)
    tar.chmod(0o600)
    os.truncate(tar, shard.size_bytes - 10)
    with pytest.raises(CorruptShardError, match=f"ends at byte {shard.size_bytes - 10}"):
        read_all(store.layout, shard)
    store.close()


async def test_a_shard_can_be_evicted_while_it_is_scrubbed(tmp_path: Path) -> None:
    """Nothing is kept open between two steps, so nobody waits for the round."""
    store = open_store(tmp_path)
    shard = await publish(store, URL, samples=2000)
    assert shard.facts is not None
    scrub = store.scrub(shard.key, shard.facts)
    assert scrub.step()
    assert await store.remove(shard)
    with pytest.raises(FileNotFoundError):
        scrub.step()
    store.close()


async def test_an_eviction_waits_for_the_end_of_a_step(tmp_path: Path) -> None:
    """The daemon's own read is not taken for a process that still has the shard open."""
    store = open_store(tmp_path)
    shard = await publish(store, URL, samples=2000)
    assert shard.facts is not None
    tar = store.layout.tar(shard.key)
    scrub = store.scrub(shard.key, shard.facts)
    with own_read_lock(tar), tar.open("rb"):
        removal = asyncio.create_task(store.remove(shard))
        step = asyncio.create_task(asyncio.to_thread(scrub.step))
        ended, _ = await asyncio.wait([removal, step], timeout=0.2)
        assert not ended
    assert await removal
    with suppress(FileNotFoundError):
        assert await step
    store.close()


async def test_the_page_cache_is_left_as_it_was(tmp_path: Path) -> None:
    """Neither are pages brought in that nobody wants, nor those given back that somebody does."""
    store = open_store(tmp_path)
    shards = [await publish(store, url, samples=200) for url in (URL, URL + "2")]
    cold, warm = (store.layout.tar(shard.key) for shard in shards)
    for tar in (cold, warm):
        with tar.open("rb") as file:
            os.fsync(file.fileno())
            if tar is cold:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident_bytes(cold):
        pytest.skip("this filesystem keeps its pages")
    assert warm.read_bytes()
    before = resident_bytes(warm)
    for shard in shards:
        read_all(store.layout, shard)
    assert resident_bytes(cold) == 0
    assert resident_bytes(warm) == before
    store.close()


async def test_a_round_goes_over_all_and_finds_the_damaged_ones(tmp_path: Path) -> None:
    """Each shard once, whatever comes before and behind it in the round."""
    store = open_store(tmp_path)
    shards = [await publish(store, f"{URL}{number}") for number in range(6)]
    for shard in (shards[1], shards[4]):
        flip(store.layout.tar(shard.key), 700)
    notes = Notes(store)
    told = (await one_round(store, notes)).to_json()
    assert sorted(notes.keys) == sorted([shards[1].key, shards[4].key])
    assert told["corrupt"] == 2
    assert told["scrubbed_shards"] == 4
    store.close()


async def test_restart_resumes_with_what_was_unchecked_for_longest(tmp_path: Path) -> None:
    """Behind the shard that was checked last before the restart, and not again from the front."""
    store = open_store(tmp_path)
    keys = sorted([(await publish(store, f"{URL}{number}")).key for number in range(6)])
    await store.catalogue.put([keys[2], 1000.0, None], "scrub")
    store.close()

    again = open_store(tmp_path)
    told = (await one_round(again, Notes(again))).to_json()
    assert told["scrubbed_shards"] == 3
    again.close()


async def test_rounds_have_a_pause_between_them_over_a_restart(tmp_path: Path) -> None:
    """Shards verified a moment ago are not read again because the daemon was restarted."""
    store = open_store(tmp_path)
    await publish(store, URL)
    first = (await one_round(store, Notes(store))).to_json()
    store.close()

    again = open_store(tmp_path)
    told = (await one_round(again, Notes(again))).to_json()
    assert told["last_round_ended_at_s"] == first["last_round_ended_at_s"]
    assert told["scrubbed_shards"] == 0
    again.close()


def test_readers_of_a_damaged_shard_are_warned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A reader hears with its next shard which one changed and why, and reads to the end."""
    with CacheRig(tmp_path) as rig:
        assert rig.read(0)
        (tar,) = (rig.daemon.cache_dir / "shards").rglob("*.tar")
        samples = iter(ShardDataset(rig.urls[:3], socket=rig.daemon.socket, timeout_s=GUARD_S))
        next(samples)
        flip(tar, 777)
        assert b"damaged near byte 0" in rig.daemon.request("POST", "/v1/verify", {"prefix": ""})
        assert len(list(samples)) == 3 * SAMPLES - 1
        assert rig.read(0), "the next reader gets a fresh copy"
    (told,) = [
        record.getMessage() for record in caplog.records if "may be wrong" in record.getMessage()
    ]
    assert told.startswith(rig.urls[0])
    assert "damaged near byte 0" in told


@pytest.mark.parametrize(
    "row", [None, [], ["x", 1, 2], ["", "1", None], [0, 0, 0], {"a": 1}, "row"]
)
def test_a_row_that_makes_no_sense_begins_a_new_round(row: object) -> None:
    """Whatever lies in the catalogue, the scrub starts."""
    assert ScrubProgress.from_row(row) == ScrubProgress()
