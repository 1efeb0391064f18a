"""Folders of files: those whose names agree up to the first dot become one sample."""

from __future__ import annotations

import hashlib
import json
import os
import random
from array import array
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from shardcache.errors import ConfigError, InputError
from shardcache.tarindex.grouping import split_name
from shardcache.writing.sample import Sample, checked, member_bytes, member_name
from shardcache.writing.source import FileFact, Input, fact_of, open_unchanged, unreadable

_LISTING, _OFFSETS, _SIZES = "listing.jsonl", "offsets", "sizes"


class FolderSource:
    """The samples of folders, in the order of a listing that `list_folders` has made; a position is a number.

    Args:
        listing: the folder of the listing.
    """

    def __init__(self, listing: str) -> None:
        self._listing = Path(listing)

    def positions(self) -> Iterator[tuple[int, int]]:
        """As `Source.positions`; sizes are exact."""
        for number, size_bytes in enumerate(array("Q", (self._listing / _SIZES).read_bytes())):
            yield size_bytes, number

    def read(self, first: int, last: int) -> Iterator[Sample]:
        """As `Source.read`."""
        with open(self._listing / _OFFSETS, "rb") as file:
            offsets = array("Q", os.pread(file.fileno(), 8 * (last + 1 - first), 8 * first))
        with open(self._listing / _LISTING, "rb") as rows:
            for offset in offsets:
                rows.seek(offset)
                key, members, label = json.loads(rows.readline())
                found = [(extension, _content(fact)) for extension, fact in members]
                if label is not None:
                    found.append(("cls", b"%d" % label))
                yield checked(Sample(key, tuple(found)))


def list_folders(roots: Sequence[Path], scratch: Path, *, seed: int | None, classes: bool) -> Input:
    """List the files of folders, sorted, or shuffled by a seed.

    A file belongs to the sample of its path below the folder up to the first dot of its name; the paths of several
    folders begin with the folder's name. Files without such a key, as readers split names, are left out and counted;
    hidden files and folders are left out. Memory: 16 bytes per sample.

    Args:
        scratch: an empty folder for the listing, which has to stay.
        classes: add a member `cls` to each sample: the number of its folder among all first-level folders, sorted.

    Raises:
        ConfigError: folders have the same name, or a sample is below no class, or in a loop of links.
        InputError: a folder cannot be read, or there is no sample.
    """
    names = [root.resolve().name for root in roots]
    if len(set(names)) < len(names):
        raise ConfigError("two of the folders have the same name", remedy="rename one, or write them separately")
    labels = {name: number for number, name in enumerate(_class_names(roots))} if classes else {}
    offsets, sizes, skipped, digest = array("Q"), array("Q"), 0, hashlib.sha256()
    with open(scratch / _LISTING, "wb") as rows:
        for root, name in zip(roots, names, strict=True):
            prefix = f"{name}/" if len(roots) > 1 else ""
            for key, group in groupby(_walk(root, ""), key=lambda file: _key(file[0])):
                if not key:
                    skipped += len(list(group))
                    continue
                members = [(file[len(key) + 1 :], fact) for file, fact in group]
                label = _label(key, labels, root) if classes else None
                offsets.append(rows.tell())
                sizes.append(_size(prefix + key, members, label))
                rows.write(json.dumps((prefix + key, members, label)).encode() + b"\n")
                facts = [(extension, fact[1:]) for extension, fact in members]
                digest.update(json.dumps((prefix + key, facts, label)).encode())
    if not offsets:
        raise InputError(
            "there are no files here that readers could take for samples",
            url=str(roots[0]),
            remedy="name files KEY.EXTENSION, such as 000017.jpg",
        )
    for table, file in ((offsets, _OFFSETS), (sizes, _SIZES)):
        if seed is not None:
            random.Random(seed).shuffle(table)  # both in the same order
        (scratch / file).write_bytes(table.tobytes())
    return Input("folder", {"listing": str(scratch)}, digest.hexdigest()[:16], skipped, tuple(labels))


def _walk(folder: Path, below: str, above: frozenset[tuple[int, int]] = frozenset()) -> Iterator[tuple[str, FileFact]]:
    """Yield the path below the root, and the facts, of every file, so that files with the same key come together."""
    try:
        here = folder.stat()
        if (here.st_dev, here.st_ino) in above:
            raise ConfigError("this folder contains a link to itself", url=str(folder), remedy="remove the link")
        above |= {(here.st_dev, here.st_ino)}
        entries = [(entry.is_dir(), entry.name) for entry in os.scandir(folder) if not entry.name.startswith(".")]
        for is_folder, name in sorted(entries, key=lambda entry: (entry[1].partition(".")[0], entry)):
            path, shown = folder / name, f"{below}{name}"
            if is_folder:
                yield from _walk(path, f"{shown}/", above)
            else:
                yield shown, fact_of(path)
    except OSError as exn:
        raise unreadable(exn, Path(exn.filename or folder)) from exn


def _key(path: str) -> str:
    """Return the key that readers will find in a member's name; empty if they will find none."""
    key = split_name(os.fsencode(path))[0]
    return "" if key.startswith(b"__") else os.fsdecode(key)


def _size(key: str, members: Sequence[tuple[str, FileFact]], label: int | None) -> int:
    sizes = [(extension, fact[1]) for extension, fact in members]
    if label is not None:
        sizes.append(("cls", len(str(label))))
    return sum(member_bytes(len(member_name(key, extension)), size) for extension, size in sizes)


def _class_names(roots: Sequence[Path]) -> list[str]:
    try:
        found = {entry.name for root in roots for entry in os.scandir(root) if entry.is_dir()}
    except OSError as exn:
        raise unreadable(exn, Path(exn.filename)) from exn
    return sorted(name for name in found if not name.startswith("."))


def _label(key: str, labels: dict[str, int], root: Path) -> int:
    name, is_below, _ = key.partition("/")
    if not is_below:
        raise ConfigError(
            f"the sample {key!r} is not in a class folder", url=str(root), remedy="move it into one, or omit --classes"
        )
    return labels[name]


def _content(fact: Sequence[Any]) -> bytes:
    with open_unchanged(fact) as file:
        data = file.read()
    if len(data) != fact[1]:
        raise InputError("the file became shorter while it was read", url=fact[0], remedy="start again")
    return data
