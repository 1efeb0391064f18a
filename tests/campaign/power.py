"""The power is cut at each call by which the daemon changes a file, and the disk left in states
that fsync allows.

The calls of undisturbed lives are logged and replayed in a model of a disk; the store's own
recovery is run over what that disk may hold. What is visible must be right, what had been flushed
must be there, and parts that are gone on with must be those of the store. Parts of objects that are
read by ranges are not flushed, so they may be lost; those that pass the comparison with their
journal must be right. A sample of the states is given to the daemon itself.
"""

import asyncio
import random
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from campaign.disk_model import BLOCK_BYTES, Chance, Content, Disk
from campaign.harness import Result, Row
from campaign.kill_audit import Parts, Problem, allocated_bytes, title_of
from campaign.kills import STORIES, ground
from campaign.lives import NEEDS_CC, OWN, PART_BYTES, Death, Ground, Life, Story
from shardcache.config.amounts import DiskAmount
from shardcache.errors import CorruptShardError, ShardcacheError
from shardcache.origin.objects import RemoteObject
from shardcache.store.folder.layout import JOURNAL, PART, SIDECAR, TAR
from shardcache.store.keys import file_key, shard_key
from shardcache.store.part_file import JOURNAL_BYTES, PartFile
from shardcache.store.partial import Partial
from shardcache.store.shard import Shard
from shardcache.store.space import Reservation
from shardcache.store.store import Store
from support.disks.shim import CHANGES, Action, Call, read_log
from support.programs.zygote import Zygote

__all__ = ["ROWS", "ground"]

_STATES = 6  # of each point
_DAEMONS = 40  # of all states of a story
_LEAST_POINTS = 5


@dataclass(frozen=True, slots=True)
class Record:
    """An undisturbed life: the disk before it, and the calls that changed it.

    Attributes:
        own: the file of the object that only this life had; there may be none.
    """

    folder: Path
    disk: Disk
    calls: list[Call]
    own: Path

    @classmethod
    def of(cls, zygote: Zygote, story: Story, folder: Path) -> Self:
        folder.mkdir()
        root = folder / "recorded"
        life = Life(zygote, story, root)
        life.cache.mkdir(exist_ok=True)
        disk = Disk(life.cache)
        life.shim.log_to(folder / "log")
        life.live(Death(Action.COUNT, 0), ops=CHANGES)
        return cls(folder, disk, list(read_log(folder / "log")), root / OWN)


def cut(name: str, field: Ground, result: Result, scale: float) -> None:
    """Cut the power after every call at scale 1, after every n-th below."""
    story = field.stories[name]
    record = Record.of(field.zygote, story, field.folder / f"story-{name}")
    step = min(max(1, round(1 / scale)), len(record.calls) // _LEAST_POINTS)
    examine(field.zygote, story, record, result, step=step, daemons=max(1, round(_DAEMONS * scale)))


def examine(
    zygote: Zygote, story: Story, record: Record, result: Result, *, step: int, daemons: int
) -> "Examiner":
    """Cut the power after every `step`-th call, and count what is wrong; it uses up the record."""
    examiner = Examiner(zygote, story, record, result)
    rng = random.Random(story.name)
    share = daemons * step / (len(record.calls) * _STATES)
    for number, call in enumerate(record.calls, 1):
        record.disk.do(call)
        for seed in range(_STATES if number % step == 0 else 0):
            how = f"{story.name}, after call {number} ({call.op.name} {call.path}), state {seed}"
            state = record.disk.after(Chance(random.Random(f"{story.name}/{number}/{seed}")))
            is_for_ranges = story.is_of_ranges and seed % 2 == 0
            examiner.examine(state, how, is_for_ranges=is_for_ranges)
            result.injected += 1
            if rng.random() < share:
                examiner.start(state, how)
    return examiner


class Examiner:
    """Lays states out on a real disk and has them recovered.

    Attributes:
        sound: how many parts readers of ranges would get, in all states together.
        damaged: how many parts with other bytes than the object's journals list in these states.
    """

    def __init__(self, zygote: Zygote, story: Story, record: Record, result: Result) -> None:
        self._story = story
        self._zygote = zygote
        self._folder = record.folder
        self._disk = record.disk
        self._own = record.own
        self._result = result
        self._tars = set(story.source.tars.values())
        self._objects = list(_objects(story, record.own))
        # What lay there damaged before the story began is found by verify, and by no power cut.
        self._spoilt = {
            Path(name).stem
            for name, data in record.disk.contents()
            if _is_tar(name) and data not in self._tars
        }
        self.sound = 0
        self.damaged = 0

    def examine(self, state: dict[str, Content], how: str, *, is_for_ranges: bool) -> None:
        """Have the store recover from a state, and count what is wrong.

        Args:
            is_for_ranges: whether unfinished files are then read by ranges, not as a whole.
        """
        root = self._folder / "state"
        lay_out(root, state)
        if is_for_ranges:
            self.damaged += sum(map(self._count_damaged, root.glob(f"partial/*{PART}")))
        try:
            problems = asyncio.run(self._problems(root, is_for_ranges=is_for_ranges))
        except ShardcacheError as exn:
            problems = [("untyped", f"the store does not open: {exn!r}")]
        for kind, problem in problems:
            self._result.fail(kind, f"{how}: {problem}")

    async def _problems(self, root: Path, *, is_for_ranges: bool) -> list[Problem]:
        problems: list[Problem] = []
        store = await asyncio.to_thread(Store.open, root, DiskAmount(10**9), DiskAmount(0))
        try:
            problems += _miscounted(store, "after the start")
            problems += [
                ("lost", f"{key} had been flushed") for key in self._certain() - set(store.shards)
            ]
            problems += [
                ("wrong", text)
                for shard in store.shards.values()
                for text in await self._faults(store, shard)
            ]
            parts = list(root.glob(f"partial/*{PART}"))
            if is_for_ranges:
                for part in parts:
                    problems += [("wrong", text) for text in await self._bad_ranges(store, part)]
                problems += _miscounted(store, "once its parts were compared")
            else:
                for part in parts:
                    problems += [("wrong", text) for text in self._bad_parts(store, part)]
            for url in self._story.source.tars:
                row = await store.catalogue.get("shard", url)
                if row is not None and row[1] != self._story.samples:
                    problems.append(("wrong", f"the catalogue says {row} of {url}"))
        finally:
            store.close()
        return problems

    async def _faults(self, store: Store, shard: Shard) -> list[str]:
        if shard.key in self._spoilt:
            return []
        try:
            await store.check(shard)
        except CorruptShardError as exn:
            return [f"a corrupt shard is visible: {exn}"]
        right = store.layout.tar(shard.key).read_bytes() in self._tars
        return [] if right else [f"{shard.key} is visible with bytes that no shard has"]

    def _certain(self) -> set[str]:
        names = set(self._disk.certain())
        tars = {
            name for name in names if _is_tar(name) and name.removesuffix(TAR) + SIDECAR in names
        }
        return {Path(name).stem for name in tars}

    def _object_in(self, part: Path) -> tuple[RemoteObject, bytes] | None:
        """Return the object of which a file holds parts, by its journal, and all of its bytes."""
        title = title_of(part.with_suffix(JOURNAL))
        version = title.get("version")
        if not version:
            return None
        for url, data in self._objects:
            is_of_it = part.stem in (shard_key(url, version), file_key(url, version))
            if is_of_it and len(data) == title.get("size_bytes"):
                return RemoteObject(url, version, len(data)), data
        return None

    def _count_damaged(self, part: Path) -> int:
        """Return how many parts a journal lists that have other bytes in the file."""
        found = self._object_in(part)
        if found is None:
            return 0
        _, data = found
        if part.stat().st_size != len(data):
            return 0  # nobody takes the file over
        listed = Parts.read(part.with_suffix(JOURNAL))
        return 0 if listed is None else len(listed.spoilt(data))

    def _bad_parts(self, store: Store, part: Path) -> list[str]:
        """Return which of the parts that a download would continue with are not the store's."""
        found = self._object_in(part)
        if found is None:
            return []
        obj, data = found
        partial = Partial.open(store.layout, obj, PART_BYTES)
        return list(_wrong(partial, partial.done, data))

    async def _bad_ranges(self, store: Store, part: Path) -> list[str]:
        """Return which of the parts that readers of ranges would get are not the object's.

        Parts that are not as the journal says are dropped, as a reader's request drops them.
        """
        found = self._object_in(part)
        file = store.parts.get(part.stem)
        if found is None:
            return [] if file is None else [f"{part} has parts of an object that no store has"]
        obj, data = found
        if part.stem != file_key(obj.url, obj.version):
            return []  # it holds a compressed shard, of which nobody reads ranges
        if file is None:
            file = await _taken_over(store, obj)
        partial = file.partial
        listed = list(partial.unchecked)
        sound = partial.sound_parts(listed)
        damaged = [number for number in listed if number not in sound]
        self.sound += len(sound)
        wrong = list(_wrong(partial, sound, data))
        partial.settle(list(sound), sound)
        for number in damaged:
            await store.parts.drop(file, number)
        return wrong

    def start(self, state: dict[str, Content], how: str) -> None:
        """Have the daemon itself recover from a state, and count what is wrong."""
        root = self._folder / "life"
        life = Life(self._zygote, self._story, root)
        lay_out(life.cache, state)
        if self._own.exists():
            shutil.copy(self._own, root / OWN)
        life.recover(self._result, how, may_fetch=True)
        shutil.rmtree(root)


def _objects(story: Story, own: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the url and the bytes of each object that the story's daemon has fetched."""
    for url, tar in story.source.tars.items():
        if url.startswith("file://"):
            yield url, Path(url.removeprefix("file://")).read_bytes()  # it may be compressed
        else:
            yield url, tar
    if own.exists():
        url = own.read_bytes().partition(b"\n")[0].decode()
        for data in story.editions:
            yield url, data


async def _taken_over(store: Store, obj: RemoteObject) -> PartFile:
    """Have an idle file taken over for readers of ranges, as their first request does."""
    reservation = Reservation(store.space)
    reservation.grow(JOURNAL_BYTES)
    file = await store.parts.open(obj, PART_BYTES, reservation)
    reservation.keep(JOURNAL_BYTES)
    reservation.close()
    return file


def _wrong(partial: Partial, numbers: Iterable[int], data: bytes) -> Iterator[str]:
    """Yield which of the parts in a file have other bytes than the object."""
    kept = partial.path.read_bytes()
    for number in numbers:
        start = number * partial.part_bytes
        span = slice(start, start + partial.part_bytes)
        if kept[span] != data[span]:
            yield f"part at {start} of {partial.obj.url} is wrong"


def _miscounted(store: Store, when: str) -> Iterator[Problem]:
    """Yield how what the store counts differs from what lies on the disk."""
    taken = {path: _taken_bytes(store, path) for path in _counted(store.layout.root)}
    on_disk_bytes = sum(taken.values())
    if store.space.used_bytes != on_disk_bytes:
        names = sorted(f"{path.name} {size}" for path, size in taken.items())
        words = f"{store.space.used_bytes} bytes counted, {on_disk_bytes} there: {names}"
        yield "wrong", f"{when}, {words}"


def _counted(root: Path) -> list[Path]:
    return [
        each for each in root.rglob("*.*") if "catalogue" not in str(each) and each.stem != "format"
    ]


def _taken_bytes(store: Store, path: Path) -> int:
    """Return what a file takes of the disk; the journal of single parts counts as a block."""
    file = store.parts.get(path.stem)
    if path.suffix == JOURNAL and file is not None:
        return JOURNAL_BYTES
    if path.suffix != PART:
        return path.stat().st_size
    if file is None:
        return allocated_bytes(path)
    return _bytes_of_parts(file.partial)


def _bytes_of_parts(partial: Partial) -> int:
    """Return what a file of single parts takes: its sound parts, and all that lies beside them.

    Zeros of a sound part may be a hole: `cp` makes them one, as do filesystems that compress.
    """
    sound = partial.sound_parts(list(partial.unchecked)).union(partial.done)
    blocks_per_part = partial.part_bytes // BLOCK_BYTES
    content = Content.of(partial.path)
    beside = [number for number in content.allocated if number // blocks_per_part not in sound]
    return partial.size_of_all(sound) + content.size_of_all(beside)


def _is_tar(name: str) -> bool:
    return name.startswith("shards/") and name.endswith(TAR)


def lay_out(root: Path, state: dict[str, Content]) -> None:
    """Make a folder hold these files, by name, and no others."""
    for path in root.rglob("*"):
        if not path.is_dir():
            path.unlink()
    for name, content in state.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content.lay_out(path)


# The stored objects are read as files here, so they cannot be in S3.
_STORIES = tuple(name for name in STORIES if not name.endswith("from S3"))
ROWS = tuple(Row(f"power cut: {name}", partial(cut, name), skip=NEEDS_CC) for name in _STORIES)
