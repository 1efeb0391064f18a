"""Published shards: whole, found again, removed only unread; folder, filesystem, space."""

import asyncio
import mmap
import os
import re
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
    run_state_machine_as_test,
)

from shardcache.errors import CacheDirError, CacheFormatError, CorruptShardError
from shardcache.origin.objects import RemoteObject
from shardcache.store.disk.file_operations import allocated_or_zero
from shardcache.store.disk.holes import punch_hole
from shardcache.store.disk.mounts import Mount, mount_of
from shardcache.store.disk.open_files import is_open_elsewhere, own_read_lock
from shardcache.store.folder.folder_contents import find_shards
from shardcache.store.folder.layout import FORMAT, SIDECAR, TAR, Layout
from shardcache.store.part_file import JOURNAL_BYTES
from shardcache.store.partial import Partial
from shardcache.store.space import Reservation, Space
from shardcache.store.store import Store
from shardcache.transport.between.parts import write_parts
from support.cases import first_quick
from support.network.other_user import needs_root
from support.shards.stores import open_store, publish

URL = "s3://bucket/shard.tar"


@pytest.fixture
def reopen(tmp_path: Path) -> Iterator[Callable[[], Store]]:
    """A function that opens the same folder again, after closing it."""
    opened: list[Store] = []

    def reopen() -> Store:
        for store in opened[-1:]:
            store.close()
        opened.append(open_store(tmp_path))
        return opened[-1]

    yield reopen
    opened[-1].close()


@pytest.fixture
def store(reopen: Callable[[], Store]) -> Store:
    return reopen()


async def test_a_published_shard_is_found_again(store: Store, reopen: Callable[[], Store]) -> None:
    """Size, samples and order of use survive a restart; nobody may write to the file."""
    first = await publish(store, URL)
    second = await publish(store, URL + "2")
    for shard, used_at_s in ((second, 1000.0), (first, 2000.0)):
        shard.used_at_s = used_at_s
        await store.remember_use(shard)
    used_bytes = store.space.used_bytes

    again = reopen()
    assert list(again.shards) == [second.key, first.key]
    assert again.space.used_bytes == used_bytes
    facts = await again.facts(again.shards[first.key])
    assert facts.url == URL
    assert facts.samples == 20
    assert facts.size_bytes == first.size_bytes
    assert store.layout.tar(first.key).stat().st_mode & 0o222 == 0, (
        "a mapped reader must never see bytes change"
    )


async def test_a_half_published_shard_is_swept(store: Store, reopen: Callable[[], Store]) -> None:
    """A sidecar left without its tar by a crash is gone after the restart."""
    shard = await publish(store, URL)
    store.layout.tar(shard.key).unlink()

    again = reopen()
    assert not again.shards
    assert not store.layout.sidecar(shard.key).exists()
    assert again.space.used_bytes == 0


@pytest.mark.parametrize("parts", [(0,), (0, 1)])
async def test_parts_that_never_reached_the_disk_are_not_counted(
    store: Store, reopen: Callable[[], Store], parts: tuple[int, ...]
) -> None:
    """After a power loss, a journal may list them, and end in the middle of a record."""
    part_bytes = 4096
    obj = RemoteObject("s3://bucket/file", '"1"', 5 * part_bytes)
    partial = Partial.open(store.layout, obj, part_bytes, is_file=True, is_sparse=True)
    write_parts(partial.parts(0, 2), bytes(range(256)) * 32)
    with partial.journal_path.open("ab") as journal:
        journal.write(b"torn")
    with partial.path.open("r+b") as file:
        for part in parts:
            punch_hole(file.fileno(), part * part_bytes, part_bytes)

    again = reopen()

    is_kept = len(parts) < 2
    journal_bytes = JOURNAL_BYTES if is_kept else partial.journal_path.stat().st_size
    assert (partial.key in again.parts) is is_kept
    assert again.space.used_bytes == allocated_or_zero(partial.path) + journal_bytes


async def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    """Only what the daemon itself named is ever counted or removed."""
    store = open_store(tmp_path)
    store.close()
    foreign = [
        store.layout.shards / "ab" / "mine.tar",
        store.layout.partial / "notes.txt",
        tmp_path / "README",
    ]
    for path in foreign:
        path.write_text("precious")
    open_store(tmp_path).close()
    assert all(path.read_text() == "precious" for path in foreign)


async def test_a_shard_that_is_mapped_is_not_removed(store: Store) -> None:
    """Bytes that some process still maps cannot be freed, so the shard stays and stays counted."""
    shard = await publish(store, URL)
    with open(store.layout.tar(shard.key), "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    used_bytes = store.space.used_bytes
    removing = asyncio.create_task(store.remove(shard))
    await asyncio.sleep(0)
    assert shard.key in store.known_keys() - store.shards.keys(), (
        "it is not taken for one that reappeared"
    )
    assert not await removing
    assert store.space.used_bytes == used_bytes
    assert list(store.shards) == [shard.key]
    mapped.close()
    assert await store.remove(shard)
    assert store.space.used_bytes == 0
    assert list(store.shards) == []


async def cancelled_during(removal: Coroutine[Any, Any, bool], path: Path) -> None:
    """Cancel a removal in which a thread is about to unlink a file, and wait for its end."""
    with own_read_lock(path):  # the thread waits for it
        removing = asyncio.create_task(removal)
        for _ in range(10):  # a task that does not wait for its thread ends within these turns
            await asyncio.sleep(0)
            removing.cancel()
        assert not removing.done()
    with pytest.raises(asyncio.CancelledError):
        await removing


async def test_cancelled_removal_ends_after_the_files_are_gone(store: Store) -> None:
    """The shard would otherwise be in service again, but without files."""
    shard = await publish(store, URL)
    tar = store.layout.tar(shard.key)
    await cancelled_during(store.remove(shard), tar)
    assert not tar.exists()
    assert shard.key not in store.known_keys()
    assert store.space.used_bytes == 0


async def test_cancelled_removal_of_a_leftover_ends_after_the_files_are_gone(store: Store) -> None:
    """Otherwise, a transfer could resume a download whose files are removed a moment later."""
    await store.quarantine(await publish(store, URL))
    [leftover] = store.leftovers.by_key.values()
    await cancelled_during(store.leftovers.remove(leftover.key), leftover.paths[0])
    assert not leftover.paths[0].exists()
    assert not store.leftovers.by_key
    assert store.space.used_bytes == 0


async def test_a_flipped_bit_is_found_and_set_aside(
    store: Store, reopen: Callable[[], Store]
) -> None:
    """`check` names file and place; quarantine ends service and keeps the count."""
    shard = await publish(store, URL, samples=200)
    tar = store.layout.tar(shard.key)
    tar.chmod(0o640)
    with open(tar, "r+b") as file:
        os.pwrite(file.fileno(), b"\xff\x00", 3 * 64 * 1024 + 5)
    with pytest.raises(CorruptShardError, match=f"byte {3 * 64 * 1024}") as caught:
        await store.check(shard)
    assert caught.value.url == URL
    used_bytes = store.space.used_bytes
    await store.quarantine(shard)
    assert not store.shards
    assert store.space.used_bytes == used_bytes
    assert (store.layout.quarantine / (shard.key + TAR)).exists()

    again = reopen()
    assert not again.shards
    assert again.space.used_bytes == used_bytes
    for key in list(again.leftovers.by_key):
        assert await again.leftovers.remove(key)
    assert again.space.used_bytes == 0
    assert not list(store.layout.quarantine.iterdir())


@pytest.mark.parametrize("suffix", [TAR, SIDECAR])
async def test_a_file_of_the_wrong_size_is_not_served(
    suffix: str, store: Store, reopen: Callable[[], Store]
) -> None:
    """A tar or a sidecar that was cut behind the daemon's back is noticed at the first use."""
    shard = await publish(store, URL)
    path = store.layout.tar(shard.key).with_suffix(suffix)
    path.chmod(0o640)
    os.truncate(path, 512)
    again = reopen()
    with pytest.raises(
        CorruptShardError, match="512 bytes instead of" if suffix == TAR else "sidecar"
    ):
        await again.facts(again.shards[shard.key])


async def test_a_shard_that_is_damaged_twice_is_counted_once(store: Store) -> None:
    """The second quarantine replaces the first; a missing file is damage, too."""
    for _ in range(2):
        shard = await publish(store, URL)
        await store.quarantine(shard)
    assert store.space.used_bytes == shard.kept_bytes
    shard = await publish(store, URL)
    store.layout.tar(shard.key).unlink()
    with pytest.raises(CorruptShardError, match="cannot be read"):
        await store.check(shard)
    await store.quarantine(shard)
    assert not store.shards


def as_nobody(question: Callable[[], bool]) -> bool:
    """Return what a child process finds that is another user, without any capability."""
    pid = os.fork()
    if pid == 0:
        status = 2
        try:
            os.setgroups([])
            os.setuid(65534)
            status = int(question())
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, 1)
    return bool(status)


@pytest.fixture
def readable_by_all() -> Iterator[Path]:
    """A folder that every user may enter and write."""
    with tempfile.TemporaryDirectory(prefix="shardcache-open-") as name:
        folder = Path(name)
        folder.chmod(0o777)
        yield folder


@needs_root
def test_another_users_file_may_be_open(readable_by_all: Path) -> None:
    """The kernel does not tell, so it is not taken for closed; of one's own it does tell."""
    path = readable_by_all / "shard.tar"
    path.write_bytes(b"tar")
    path.chmod(0o444)
    assert as_nobody(lambda: is_open_elsewhere(path))
    os.chown(path, 65534, -1)
    assert not as_nobody(lambda: is_open_elsewhere(path))


@needs_root
async def test_a_cache_of_another_users_shards_is_refused(readable_by_all: Path) -> None:
    """None of them could ever be evicted: the error says so at the start, and what to do."""
    root = readable_by_all / "cache"
    store = open_store(root)
    await publish(store, URL)
    store.close()
    for path in (root, *root.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o444)

    def is_refused() -> bool:
        with pytest.raises(CacheDirError, match="another user") as caught:
            find_shards(Layout(root))
        return "chown -R 65534" in caught.value.remedy

    assert as_nobody(is_refused)


async def test_a_folder_without_a_number_is_taken_over_with_its_shards(
    store: Store, reopen: Callable[[], Store]
) -> None:
    """A folder without a number has its shards served, and gets a number."""
    shard = await publish(store, URL)
    store.layout.format.unlink()
    taken_over = reopen()
    assert [(await taken_over.facts(found)).url for found in taken_over.shards.values()] == [URL]
    assert shard.key in taken_over.shards
    assert store.layout.format.read_text() == f"{FORMAT}\n"


@pytest.mark.parametrize(
    ("content", "message", "remedy"),
    [
        (
            f"{FORMAT + 1}".encode(),
            f"has format {FORMAT + 1}.* formats up to {FORMAT}",
            "newer release .* --cache-dir",
        ),
        (b"", "does not contain a number", "is a cache folder"),
        (b"\xff\xfe", "does not contain a number", "is a cache folder"),
    ],
)
def test_a_newer_folder_is_left_alone(
    tmp_path: Path, content: bytes, message: str, remedy: str
) -> None:
    """The error says what to do, also if it may be no cache, and nothing has changed."""
    (tmp_path / "format").write_bytes(content)
    with pytest.raises(CacheFormatError, match=message) as caught:
        open_store(tmp_path)
    assert re.search(remedy, caught.value.remedy)
    assert [path.name for path in tmp_path.iterdir()] == ["format"]


@pytest.mark.parametrize(
    "content", first_quick([b"", b"\xff\xfe", b"one", b"1_0", b"1\n1\n", b"-1", b"\0" * 4096], 2)
)
async def test_damaged_format_file_of_a_cache_is_written_again(
    store: Store, reopen: Callable[[], Store], content: bytes
) -> None:
    """A folder that is otherwise a cache has its shards served and its number restored."""
    shard = await publish(store, URL)
    store.layout.format.write_bytes(content)
    assert shard.key in reopen().shards
    assert store.layout.format.read_text() == f"{FORMAT}\n"


@pytest.mark.parametrize("content", [b"3\n", b"9\n", b"1000\n"])
async def test_format_file_that_names_another_number_than_its_copy_is_damaged(
    store: Store, reopen: Callable[[], Store], content: bytes
) -> None:
    """A flipped bit makes such a number; a later release would have written both."""
    shard = await publish(store, URL)
    store.layout.format.write_bytes(content)
    assert shard.key in reopen().shards
    assert store.layout.format.read_text() == f"{FORMAT}\n"


@pytest.mark.parametrize("copy", [b"", b"\xff", b"2\n", b"7\n", None])
def test_number_of_a_later_release_is_believed_unless_its_copy_is_of_this_one(
    tmp_path: Path, copy: bytes | None
) -> None:
    """Whatever else the copy is, nothing is changed in the folder."""
    open_store(tmp_path).close()
    layout = Layout(tmp_path)
    layout.format.write_bytes(b"2\n")
    layout.format_copy.unlink()
    if copy is not None:
        layout.format_copy.write_bytes(copy)
    with pytest.raises(CacheFormatError, match="has format 2"):
        open_store(tmp_path)
    assert layout.format.read_bytes() == b"2\n"


async def test_damaged_copy_of_the_format_is_written_again(
    store: Store, reopen: Callable[[], Store]
) -> None:
    """The shards are served if the file itself is right."""
    shard = await publish(store, URL)
    store.layout.format_copy.write_bytes(b"3\n")
    assert shard.key in reopen().shards
    assert store.layout.format_copy.read_text() == f"{FORMAT}\n"


MOUNTS = (
    "22 1 254:0 / / rw,relatime - ext4 /dev/vda rw",
    "30 22 0:40 / /data rw,relatime shared:1 - nfs4 server:/export rw,vers=4.2",
    "31 22 259:1 / /data rw,relatime - xfs /dev/nvme0n1 rw",
    r"32 22 0:41 / /mnt/two\040words rw - fuse.sshfs me@there: rw",
)


@pytest.mark.parametrize(
    ("path", "mount"),
    [
        ("/nowhere/yet", Mount(Path("/"), "ext4")),
        ("/data/cache", Mount(Path("/data"), "xfs")),
        ("/database", Mount(Path("/"), "ext4")),
        ("/mnt/two words/x", Mount(Path("/mnt/two words"), "fuse.sshfs")),
    ],
)
def test_a_path_is_on_its_nearest_visible_mount(path: str, mount: Mount) -> None:
    """The longest folder of whole names counts; the later of two mounts hides the other."""
    assert mount_of(Path(path), MOUNTS) == mount


CAPACITY_BYTES = 100
DISK_BYTES = 120
MIN_FREE_BYTES = 10


class Accounting(RuleBasedStateMachine):
    """Reservations open, grow, are written and close, as the disk's free space follows."""

    reservations = Bundle("reservations")

    def __init__(self) -> None:
        super().__init__()
        self.space = Space(CAPACITY_BYTES, MIN_FREE_BYTES)
        self.on_disk_bytes = 0

    @property
    def free_bytes(self) -> int:
        return DISK_BYTES - self.on_disk_bytes

    @rule(target=reservations)
    def open(self) -> Reservation:
        return Reservation(self.space)

    @rule(reservation=reservations, size_bytes=st.integers(0, 60))
    def grow(self, reservation: Reservation, size_bytes: int) -> None:
        """A transfer asks for space, and takes it where there is some."""
        self.space.measure(self.free_bytes)
        if self.space.shortfall_bytes(size_bytes) == 0:
            reservation.grow(size_bytes)

    @rule(reservation=reservations)
    def write(self, reservation: Reservation) -> None:
        self.on_disk_bytes += reservation.unwritten_bytes
        reservation.mark_written(reservation.unwritten_bytes)

    @rule(reservation=consumes(reservations), keep=st.booleans())
    def close(self, reservation: Reservation, keep: bool) -> None:
        written_bytes = reservation.size_bytes - reservation.unwritten_bytes
        kept_bytes = written_bytes if keep else 0
        self.on_disk_bytes -= written_bytes - kept_bytes
        reservation.close(kept_bytes)
        reservation.close()  # the second close changes nothing

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        size_bytes = data.draw(st.integers(0, self.space.kept_bytes))
        self.space.kept_bytes -= size_bytes
        self.on_disk_bytes -= size_bytes

    @invariant()
    def bounds_hold(self) -> None:
        """Neither the capacity nor the free-space floor is ever passed."""
        assert 0 <= self.space.used_bytes <= CAPACITY_BYTES
        assert self.free_bytes >= MIN_FREE_BYTES
        assert self.on_disk_bytes == self.space.used_bytes - self.space.unwritten_bytes


@pytest.mark.hypothesis  # whose plugin does not see that it runs a state machine
def test_bounds_hold_in_any_order() -> None:
    """No sequence of transfers, writes, ends and evictions passes capacity or floor."""
    run_state_machine_as_test(Accounting)
