"""The power is cut at each call by which the daemon changes a file, and the disk left in states
that fsync allows.

The calls of undisturbed lives are logged and replayed in a model of a disk; the store's own
recovery is run over what that disk may hold. What is visible must be right, what had been flushed
must be there, and parts that are gone on with must be those of the store. A sample of the states is
given to the daemon itself.
"""

import asyncio
import json
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

from campaign.harness import Result, Row
from campaign.kill_stories import SAMPLES
from campaign.kills import ground
from campaign.lives import NEEDS_CC, PART_BYTES, Death, Ground, Life, Story
from shardcache.config.amounts import DiskAmount
from shardcache.errors import CorruptShardError, ShardcacheError
from shardcache.origin.objects import RemoteObject
from shardcache.store.folder.layout import JOURNAL, PART, SIDECAR, TAR
from shardcache.store.keys import shard_key
from shardcache.store.partial import Partial
from shardcache.store.shard import Shard
from shardcache.store.store import Store
from support.disks.shim import CHANGES, Action, Call, Op, read_log
from support.programs.zygote import Zygote

T = TypeVar("T")
BLOCK_BYTES = 4096
_FOLDER = -1  # stands for an inode in the entry of a folder


@dataclass(slots=True)
class File:
    """One inode. `blocks`: number → what was in it since then, the flushed content not among it."""

    data: bytearray = field(default_factory=bytearray)  # as the running system sees it
    flushed: bytes = b""  # as it was when it was last flushed
    sizes: list[int] = field(
        default_factory=lambda: [0]
    )  # it had since then, the flushed one first
    blocks: dict[int, list[bytes]] = field(default_factory=dict)

    def write(self, offset: int, data: bytes) -> None:
        self.resize(max(len(self.data), offset + len(data)))
        self.data[offset : offset + len(data)] = data
        for number in range(offset // BLOCK_BYTES, -(-(offset + len(data)) // BLOCK_BYTES)):
            self.blocks.setdefault(number, []).append(_block(self.data, number))

    def resize(self, size: int) -> None:
        """Cut it, or let zeros follow."""
        if size != len(self.data):
            del self.data[size:]
            self.data.extend(bytes(size - len(self.data)))
            self.sizes.append(size)

    def flush(self) -> None:
        self.flushed = bytes(self.data)
        self.sizes = [len(self.data)]
        self.blocks = {}

    def after(self, choose: "Chance") -> bytes:
        """Return one of the contents that it may have after a power cut."""
        size = choose(self.sizes)
        content = bytearray(self.flushed[:size].ljust(size, b"\0"))
        for number, versions in self.blocks.items():
            at = number * BLOCK_BYTES
            if at < size:
                block = choose([_block(self.flushed, number), *versions], choose.nonsense())
                content[at : min(at + BLOCK_BYTES, size)] = block.ljust(BLOCK_BYTES, b"\0")[
                    : size - at
                ]
        return bytes(content)


def _block(data: bytes | bytearray, number: int) -> bytes:
    return bytes(data[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES])


class Chance:
    """Chooses what of that which was not flushed reached the disk.

    Most states in which bugs show are near the ends (nothing did, all did), so these come up often.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._kept = rng.choice((0.0, 0.1, 0.5, 0.9, 1.0))
        self._nonsense = rng.choice((0.0, 0.0, 0.3))

    def __call__(self, versions: list[T], nonsense: T | None = None) -> T:
        """Return one of the versions, oldest first, or nonsense for one that did not arrive."""
        if self._rng.random() < self._kept:
            return versions[-1]
        if nonsense is not None and len(versions) > 1 and self._rng.random() < self._nonsense:
            return nonsense
        return self._rng.choice(versions[:-1] or versions)

    def nonsense(self) -> bytes:
        """Return a block of zeros, or of what some other file once held."""
        return bytes(BLOCK_BYTES) if self._rng.random() < 0.5 else self._rng.randbytes(BLOCK_BYTES)


class Disk:
    """A folder as the calls of a log leave it, on a filesystem that promises no more than fsync
    does.

    A name holds any of the values that it had since its folder was last flushed, each name for
    itself; a block of a file holds any of the contents that it had since the file was last flushed,
    or nonsense where the last one never reached the disk; a file has any of its sizes since then.
    That is weaker than what ext4, xfs or btrfs promise, as in ALICE (Pillai et al., OSDI 2014),
    whose authors found most of the bugs of this kind in the orders that filesystems may, but seldom
    do, write in.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files: list[File] = []
        self._entries: dict[
            str, list[int | None]
        ] = {}  # name below root → what it led to since its folder was flushed
        for path in sorted(root.rglob("*")):
            self._entries[str(path.relative_to(root))] = [
                _FOLDER if path.is_dir() else self._known(path)
            ]

    def _known(self, path: Path) -> int:
        file = File(bytearray(path.read_bytes()))
        file.flush()
        self._files.append(file)
        return len(self._files) - 1

    def do(self, call: Call) -> None:
        name = self._name(call.path)
        if name is None:
            return
        match call.op:
            case Op.RENAME:
                self._rename(name, self._name(call.path2) or "")
            case Op.UNLINK | Op.RMDIR:
                self._put(name, None)
            case Op.MKDIR:
                self._put(name, _FOLDER)
            case Op.FSYNC if self._is_folder(name):
                self._flush_folder(name)
            case Op.CREATE if self._present(name) is None:
                self._files.append(File())
                self._put(name, len(self._files) - 1)
            case _:
                number = self._present(name)
                if number not in (None, _FOLDER):
                    _change(self._files[number], call)

    def _name(self, path: str) -> str | None:
        if path.endswith(" (deleted)") or not path.startswith(f"{self._root}"):
            return None
        return os.path.relpath(path, self._root)

    def _present(self, name: str) -> int | None:
        return self._entries.get(name, [None])[-1]

    def _is_folder(self, name: str) -> bool:
        return name == "." or self._present(name) == _FOLDER

    def _put(self, name: str, value: int | None) -> None:
        self._entries.setdefault(name, [None]).append(value)

    def _rename(self, name: str, to: str) -> None:
        for below in [each for each in self._entries if each.startswith(f"{name}/")]:
            self._rename(below, to + below[len(name) :])
        self._put(to, self._present(name))
        self._put(name, None)

    def _flush_folder(self, folder: str) -> None:
        for name, values in self._entries.items():
            if (os.path.dirname(name) or ".") == folder:  # noqa: PTH120
                del values[:-1]

    def after(self, chance: Chance) -> dict[str, bytes]:
        """Return one of the states that a power cut now may leave: files by name."""
        chosen = {name: chance(values) for name, values in self._entries.items()}
        led = {
            name: number
            for name, number in chosen.items()
            if number is not None and number != _FOLDER
        }
        contents = {number: self._files[number].after(chance) for number in set(led.values())}
        return {name: contents[number] for name, number in led.items()}

    def contents(self) -> Iterator[tuple[str, bytes]]:
        """Yield name and content of each file as the running system sees it."""
        for name in self._entries:
            number = self._present(name)
            if number not in (None, _FOLDER):
                yield name, bytes(self._files[number].data)

    def certain(self) -> Iterator[str]:
        """Yield the names of the files that are there whatever happens."""
        return (
            name
            for name, values in self._entries.items()
            if len(values) == 1 and values[0] not in (None, _FOLDER)
        )


def _change(file: File, call: Call) -> None:
    match call.op:
        case Op.CREATE if call.flags & os.O_TRUNC:
            file.resize(0)
        case Op.WRITE:
            file.write(call.offset, call.data)
        case Op.ALLOCATE:
            file.resize(max(len(file.data), call.offset + call.length))
        case Op.TRUNCATE:
            file.resize(call.length)
        case Op.FSYNC:
            file.flush()


__all__ = ["ROWS", "ground"]

_STATES = 6  # of each point
_DAEMONS = 40  # of all states of a story
_LEAST_POINTS = 5


@dataclass(frozen=True, slots=True)
class Record:
    """An undisturbed life: the disk before it, and the calls that changed it."""

    folder: Path
    disk: Disk
    calls: list[Call]

    @classmethod
    def of(cls, zygote: Zygote, story: Story, folder: Path) -> Self:
        folder.mkdir()
        life = Life(zygote, story, folder / "recorded")
        life.cache.mkdir(exist_ok=True)
        disk = Disk(life.cache)
        life.shim.log_to(folder / "log")
        life.live(Death(Action.COUNT, 0), ops=CHANGES)
        return cls(folder, disk, list(read_log(folder / "log")))


def cut(name: str, field: Ground, result: Result, scale: float) -> None:
    """Cut the power after every call at scale 1, after every n-th below."""
    story = field.stories[name]
    record = Record.of(field.zygote, story, field.folder / f"story-{name}")
    step = min(max(1, round(1 / scale)), len(record.calls) // _LEAST_POINTS)
    examine(field.zygote, story, record, result, step=step, daemons=max(1, round(_DAEMONS * scale)))


def examine(
    zygote: Zygote, story: Story, record: Record, result: Result, *, step: int, daemons: int
) -> None:
    """Cut the power after every `step`-th call, and count what is wrong; it uses up the record."""
    examiner = Examiner(zygote, story, record.folder, record.disk, result)
    rng = random.Random(story.name)
    share = daemons * step / (len(record.calls) * _STATES)
    for number, call in enumerate(record.calls, 1):
        record.disk.do(call)
        for seed in range(_STATES if number % step == 0 else 0):
            how = f"{story.name}, after call {number} ({call.op.name} {call.path}), state {seed}"
            state = record.disk.after(Chance(random.Random(f"{story.name}/{number}/{seed}")))
            examiner.examine(state, how)
            result.injected += 1
            if rng.random() < share:
                examiner.start(state, how)


class Examiner:
    """Lays states out on a real disk and has them recovered."""

    def __init__(
        self, zygote: Zygote, story: Story, folder: Path, disk: Disk, result: Result
    ) -> None:
        self._story = story
        self._zygote = zygote
        self._folder = folder
        self._disk = disk
        self._result = result
        self._tars = set(story.source.tars.values())
        # What lay there damaged before the story began is found by verify, and by no power cut.
        self._spoilt = {
            Path(name).stem
            for name, data in disk.contents()
            if _is_tar(name) and data not in self._tars
        }

    def examine(self, state: dict[str, bytes], how: str) -> None:
        root = self._folder / "state"
        lay_out(root, state)
        try:
            problems = asyncio.run(self._problems(root))
        except ShardcacheError as exn:
            problems = [("untyped", f"the store does not open: {exn!r}")]
        for kind, problem in problems:
            self._result.fail(kind, f"{how}: {problem}")

    async def _problems(self, root: Path) -> list[tuple[str, str]]:
        problems: list[tuple[str, str]] = []
        store = await asyncio.to_thread(Store.open, root, DiskAmount(10**9), DiskAmount(0))
        try:
            counted = [
                each
                for each in root.rglob("*.*")
                if "catalogue" not in str(each) and each.stem != "format"
            ]
            on_disk_bytes = sum(each.stat().st_size for each in counted)
            if store.space.used_bytes != on_disk_bytes:
                problems.append(
                    ("wrong", f"{store.space.used_bytes} bytes counted, {on_disk_bytes} there")
                )
            problems += [
                ("lost", f"{key} had been flushed") for key in self._certain() - set(store.shards)
            ]
            problems += [
                ("wrong", text)
                for shard in store.shards.values()
                for text in await self._faults(store, shard)
            ]
            for part in list(root.glob(f"partial/*{PART}")):
                problems += [("wrong", text) for text in self._bad_parts(store, part)]
            for url in self._story.source.tars:
                row = await store.catalogue.get("shard", url)
                if row is not None and row[1] != SAMPLES:
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

    def _bad_parts(self, store: Store, part: Path) -> list[str]:
        """Return which of the parts that a download would continue with are not the store's."""
        for url, size_bytes in self._story.source.stored_bytes.items():
            stored = Path(url.removeprefix("file://"))
            version = title_of(part).get("version")
            if version and shard_key(url, version) == part.stem:
                partial = Partial.open(
                    store.layout, RemoteObject(url, version, size_bytes), PART_BYTES
                )
                data = stored.read_bytes()
                kept = partial.path.read_bytes()
                spans = [slice(at * PART_BYTES, (at + 1) * PART_BYTES) for at in partial.done]
                return [
                    f"part at {span.start} of {url} is wrong"
                    for span in spans
                    if data[span] != kept[span]
                ]
        return []

    def start(self, state: dict[str, bytes], how: str) -> None:
        """Have the daemon itself recover from a state, and count what is wrong."""
        root = self._folder / "life"
        life = Life(self._zygote, self._story, root)
        lay_out(life.cache, state)
        life.recover(self._result, how, may_fetch=True)
        shutil.rmtree(root)


def _is_tar(name: str) -> bool:
    return name.startswith("shards/") and name.endswith(TAR)


def title_of(part: Path) -> dict[str, str]:
    """Return what a journal says of its part file, or nothing."""
    try:
        title = json.loads(part.with_suffix(JOURNAL).read_bytes().partition(b"\n")[0])
    except (OSError, ValueError):
        return {}
    return title if isinstance(title, dict) else {}


def lay_out(root: Path, state: dict[str, bytes]) -> None:
    """Make a folder hold these files, by name, and no others."""
    for path in root.rglob("*"):
        if not path.is_dir():
            path.unlink()
    for name, data in state.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


_STORIES = ("first start", "take over", "pin", "fetch", "resume and evict", "verify, evict, count")
ROWS = tuple(Row(f"power cut: {name}", partial(cut, name), skip=NEEDS_CC) for name in _STORIES)
