"""A disk as the calls of a log leave it, and what a power cut may leave of that."""

import os
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

from support.disks.shim import Call, Op

T = TypeVar("T")
BLOCK_BYTES = 4096
PUNCH_HOLE = 2  # bit of the mode of an allocation that frees space instead
_FOLDER = -1  # stands for an inode in the entry of a folder


class Content(NamedTuple):
    """Bytes of a file, and the numbers of its blocks that take space.

    The other blocks are holes, which read as zeros.
    """

    data: bytes = b""
    allocated: frozenset[int] = frozenset()

    @classmethod
    def of(cls, path: Path) -> Self:
        """Return the content of a file on a real disk."""
        allocated = (_numbers(start, end) for start, end in data_ranges(path))
        return cls(path.read_bytes(), frozenset(chain.from_iterable(allocated)))

    def block(self, number: int) -> bytes | None:
        """Return a block, which is short at the end of the file; None for a hole."""
        return _block(self.data, number) if number in self.allocated else None

    def size_of_all(self, numbers: Iterable[int]) -> int:
        """Return the size of some blocks together, in bytes."""
        return sum(len(_block(self.data, number)) for number in numbers)

    def lay_out(self, path: Path) -> None:
        """Write the file to a real disk, with its holes."""
        with path.open("wb", buffering=0) as file:
            file.truncate(len(self.data))
            for number in sorted(self.allocated):
                os.pwrite(file.fileno(), _block(self.data, number), number * BLOCK_BYTES)
            if self.allocated and len(self.allocated) < len(_numbers(0, len(self.data))):
                # Only now does ext4 add a block for the list of the pieces between the holes.
                os.fsync(file.fileno())


def data_ranges(path: Path) -> Iterator[tuple[int, int]]:
    """Yield start and end of what lies between the holes of a file, up to its end."""
    with path.open("rb") as file:
        descriptor = file.fileno()
        end = 0
        while True:
            try:
                start = os.lseek(descriptor, end, os.SEEK_DATA)
            except OSError:  # there is no more data
                return
            end = os.lseek(descriptor, start, os.SEEK_HOLE)
            yield start, end


def _numbers(start: int, end: int) -> range:
    """Return the numbers of all blocks with bytes between two offsets."""
    return range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES))


def _block(data: bytes | bytearray, number: int) -> bytes:
    return bytes(data[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES])


@dataclass(slots=True)
class File:
    """One inode.

    Attributes:
        data: its bytes as the running system sees them.
        allocated: numbers of the blocks that take space, as the running system sees them.
        flushed: as it was when it was last flushed.
        sizes: it had since then, the flushed one first.
        blocks: by number, what was in a block since then, the flushed content not among it; None
            for a hole.
    """

    data: bytearray = field(default_factory=bytearray)
    allocated: set[int] = field(default_factory=set)
    flushed: Content = field(default_factory=Content)
    sizes: list[int] = field(default_factory=lambda: [0])
    blocks: dict[int, list[bytes | None]] = field(default_factory=dict)

    @classmethod
    def known(cls, content: Content) -> Self:
        """Return a file that is on the disk already."""
        file = cls(bytearray(content.data), set(content.allocated))
        file.flush()
        return file

    def write(self, offset: int, data: bytes) -> None:
        self.resize(max(len(self.data), offset + len(data)))
        self.data[offset : offset + len(data)] = data
        for number in _numbers(offset, offset + len(data)):
            self._changed(number)

    def allocate(self, offset: int, length: int) -> None:
        """Fill holes with zeros, which may follow the present end."""
        self.resize(max(len(self.data), offset + length))
        for number in _numbers(offset, offset + length):
            if number not in self.allocated:
                self._changed(number)

    def punch(self, offset: int, length: int) -> None:
        """Make whole blocks holes, and zeros of what is only a piece of a block.

        The size stays. What a power cut leaves of that may differ from block to block: each is
        a hole, or still there, or was given to another file and written by that.
        """
        end = max(offset, min(offset + length, len(self.data)))
        self.data[offset:end] = bytes(end - offset)
        for number in _numbers(offset, end):
            if number not in self.allocated:
                continue
            starts_inside = number * BLOCK_BYTES >= offset
            ends_inside = (number + 1) * BLOCK_BYTES <= offset + length
            if starts_inside and ends_inside:
                self.allocated.discard(number)
                self.blocks.setdefault(number, []).append(None)
            else:
                self._changed(number)

    def _changed(self, number: int) -> None:
        """Note that a block has been written."""
        self.allocated.add(number)
        self.blocks.setdefault(number, []).append(_block(self.data, number))

    def resize(self, size: int) -> None:
        """Cut it, or let a hole follow."""
        if size != len(self.data):
            del self.data[size:]
            self.data.extend(bytes(size - len(self.data)))
            self.allocated.intersection_update(_numbers(0, size))
            self.sizes.append(size)

    def flush(self) -> None:
        self.flushed = Content(bytes(self.data), frozenset(self.allocated))
        self.sizes = [len(self.data)]
        self.blocks = {}

    def after(self, choose: "Chance") -> Content:
        """Return one of the contents that it may have after a power cut."""
        size = choose(self.sizes)
        data = bytearray(self.flushed.data[:size].ljust(size, b"\0"))
        allocated = set(self.flushed.allocated)
        for number, versions in self.blocks.items():
            at = number * BLOCK_BYTES
            if at < size:
                block = choose([self.flushed.block(number), *versions], choose.nonsense())
                end = min(at + BLOCK_BYTES, size)
                data[at:end] = (block or b"").ljust(BLOCK_BYTES, b"\0")[: end - at]
                if block is None:
                    allocated.discard(number)
                else:
                    allocated.add(number)
        allocated.intersection_update(_numbers(0, size))
        return Content(bytes(data), frozenset(allocated))


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
        self._files.append(File.known(Content.of(path)))
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

    def after(self, chance: Chance) -> dict[str, Content]:
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
        case Op.ALLOCATE if call.flags & PUNCH_HOLE:
            file.punch(call.offset, call.length)
        case Op.ALLOCATE:
            file.allocate(call.offset, call.length)
        case Op.TRUNCATE:
            file.resize(call.length)
        case Op.FSYNC:
            file.flush()
