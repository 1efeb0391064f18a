"""Possible contents of a disk after a power cut: a model of a filesystem that promises no more than fsync does.

A name holds any of the values that it had since its folder was last flushed, each name for itself; a block of a file
holds any of the contents that it had since the file was last flushed, or nonsense where the last one never reached the
disk; a file has any of its sizes since then. That is weaker than what ext4, xfs or btrfs promise, as in ALICE
(Pillai et al., OSDI 2014), whose authors found most of the bugs of this kind in the orders that filesystems may, but
seldom do, write in.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from support.disks.shim import Call, Op

T = TypeVar("T")

BLOCK_BYTES = 4096

_FOLDER = -1  # stands for an inode in the entry of a folder


@dataclass(slots=True)
class File:
    """One inode.

    Attributes:
        blocks: number → what was in it since then, the flushed content not among it.
    """

    data: bytearray = field(default_factory=bytearray)  # as the running system sees it
    flushed: bytes = b""  # as it was when it was last flushed
    sizes: list[int] = field(default_factory=lambda: [0])  # it had since then, the flushed one first
    blocks: dict[int, list[bytes]] = field(default_factory=dict)

    def write(self, offset: int, data: bytes) -> None:
        """Take bytes in, that may get lost."""
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
        """Make all of it last."""
        self.flushed, self.sizes, self.blocks = bytes(self.data), [len(self.data)], {}

    def after(self, choose: Chance) -> bytes:
        """Return one of the contents that it may have after a power cut."""
        size = choose(self.sizes)
        content = bytearray(self.flushed[:size].ljust(size, b"\0"))
        for number, versions in self.blocks.items():
            at = number * BLOCK_BYTES
            if at < size:
                block = choose([_block(self.flushed, number), *versions], choose.nonsense())
                content[at : min(at + BLOCK_BYTES, size)] = block.ljust(BLOCK_BYTES, b"\0")[: size - at]
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
        """Return one of the versions, oldest first, or nonsense in place of one that did not arrive."""
        if self._rng.random() < self._kept:
            return versions[-1]
        if nonsense is not None and len(versions) > 1 and self._rng.random() < self._nonsense:
            return nonsense
        return self._rng.choice(versions[:-1] or versions)

    def nonsense(self) -> bytes:
        """Return a block of zeros, or of what some other file once held."""
        return bytes(BLOCK_BYTES) if self._rng.random() < 0.5 else self._rng.randbytes(BLOCK_BYTES)


class Disk:
    """A folder as the calls of a log leave it, with all that is not yet certain of it."""

    def __init__(self, root: Path) -> None:
        """Begin with what lies in `root` now, taken as flushed."""
        self._root = root
        self._files: list[File] = []
        self._entries: dict[str, list[int | None]] = {}  # name below root → what it led to since its folder was flushed
        for path in sorted(root.rglob("*")):
            self._entries[str(path.relative_to(root))] = [_FOLDER if path.is_dir() else self._known(path)]

    def _known(self, path: Path) -> int:
        file = File(bytearray(path.read_bytes()))
        file.flush()
        self._files.append(file)
        return len(self._files) - 1

    def do(self, call: Call) -> None:
        """Take in one call of the log."""
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
            case _ if (number := self._present(name)) not in (None, _FOLDER):
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
        """Return one of the states that a power cut now may leave: files by name, their folders taken for granted."""
        chosen = {name: chance(values) for name, values in self._entries.items()}
        led = {name: number for name, number in chosen.items() if number is not None and number != _FOLDER}
        contents = {number: self._files[number].after(chance) for number in set(led.values())}
        return {name: contents[number] for name, number in led.items()}

    def contents(self) -> Iterator[tuple[str, bytes]]:
        """Yield name and content of each file as the running system sees it."""
        for name in self._entries:
            if (number := self._present(name)) not in (None, _FOLDER):
                yield name, bytes(self._files[number].data)

    def certain(self) -> Iterator[str]:
        """Yield the names of the files that are there whatever happens."""
        return (name for name, values in self._entries.items() if len(values) == 1 and values[0] not in (None, _FOLDER))


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
