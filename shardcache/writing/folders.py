"""Folders of files as an input of `shardcache write`: each file is a member of a sample.

`list_folders` walks the folders once and writes a listing to a scratch folder: the key, the files
and the size of each sample. Each writer process then opens a `FolderSource` on the same listing,
and reads the files of the samples that it has to write.

A sample's key is the path of its files up to a dot of their names, and an extension is what follows
that dot. So `a/17.jpg` and `a/17.txt` are the members `jpg` and `txt` of the sample `a/17`.
"""

import hashlib
import json
import os
import random
from array import array
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

from shardcache.shared.exceptions import ConfigError, InputError
from shardcache.shared.tarindex.grouping import split_name
from shardcache.shared.tarindex.key_splits import LAST_DOT, KeySplit
from shardcache.writing.merged_names import MergeFinder, find_numbered_pair
from shardcache.writing.sample_tar import Sample, checked, tar_bytes
from shardcache.writing.sources import (
    IDENTITY_CHARS,
    Input,
    InputFile,
    is_left_out,
    read_error,
)

# The files of a listing. `_ROWS` has a line of JSON for each sample, in the order in which the
# folders were walked: the key, the members, and the class number or null. A member is its
# extension and the values of its `InputFile`.
_ROWS = "listing.jsonl"
# The other two have a number for each sample, in the order in which the samples are read: the
# offset of the sample's row, and the space that the sample takes in a tar. Both are in bytes.
_OFFSETS = "offsets"
_SIZES = "sizes"
_NUMBER_BYTES = 8  # size of a number in `_OFFSETS` and `_SIZES`, which are arrays of type "Q"

_Members = list[tuple[str, InputFile]]  # the extension and the file of each member of a sample


class FolderSource:
    """The samples of folders, in the order of the listing that `list_folders` made.

    The position of a sample is its number in that order.

    Args:
        listing: folder with the files of the listing.
    """

    def __init__(self, listing: str) -> None:
        self._listing = Path(listing)

    def sized_positions(self) -> Iterator[tuple[int, int]]:
        """Yield size and position of each sample, as `Source.sized_positions`; sizes are exact."""
        sizes = array("Q", (self._listing / _SIZES).read_bytes())
        for number, size_bytes in enumerate(sizes):
            yield size_bytes, number

    def read(self, first: int, last: int) -> Iterator[Sample]:
        """Yield samples from the files of the listing, as `Source.read`."""
        with open(self._listing / _OFFSETS, "rb") as file:
            file.seek(_NUMBER_BYTES * first)
            offsets = array("Q", file.read(_NUMBER_BYTES * (last + 1 - first)))
        with open(self._listing / _ROWS, "rb") as rows:
            for offset in offsets:
                rows.seek(offset)
                key, files, class_number = json.loads(rows.readline())
                members = [(extension, _content(InputFile(*file))) for extension, file in files]
                if class_number is not None:
                    members.append(("cls", b"%d" % class_number))
                yield checked(Sample(key, tuple(members)))


def list_folders(
    roots: Sequence[Path],
    scratch: Path,
    *,
    seed: int | None,
    add_classes: bool,
    key_at: KeySplit | None = None,
) -> Input:
    """List the files of folders as samples. Takes 16 bytes of memory per sample.

    A key is a path below the folder. If there are several folders, each key begins with the name
    of its folder. Files in whose names readers would find no key are left out and counted. Hidden
    files and folders, and files that macOS adds, are left out without being counted.

    Args:
        roots: the folders.
        scratch: folder for the listing, which has to stay there while the input is read.
        seed: seed of a random order of the samples; None to sort them.
        add_classes: True to add a member `cls` to each sample: the number of its folder among all
            first-level folders with samples, sorted.
        key_at: the dot before which keys end. With "last-dot", the dots before the last one become
            underscores. None means the first dot, but files that look like several samples with
            one key are then an error.

    Raises:
        ConfigError: two folders have the same name, a sample is in no class folder, a link leads
            to a folder that contains it, or the files of several samples would become one sample.
        InputError: a file or folder cannot be read, or there are no samples.
    """
    names = [root.resolve().name for root in roots]
    if len(set(names)) < len(names):
        raise ConfigError(
            "two of the folders have the same name",
            remedy="rename one, or write them separately",
        )
    class_numbers = None
    if add_classes:
        class_numbers = {name: number for number, name in enumerate(_class_names(roots))}
    with open(scratch / _ROWS, "wb") as rows:
        listing = _Listing(rows, class_numbers)
        for root, name in zip(roots, names, strict=True):
            prefix = f"{name}/" if len(roots) > 1 else ""
            listing.add(root, prefix, key_at)
    if not listing.offsets:
        raise InputError(
            "there are no files here that readers could take for samples",
            url=str(roots[0]),
            remedy="name files KEY.EXTENSION, such as 000017.jpg",
        )
    listing.store_order(scratch, seed)
    return Input(
        "folder",
        {"listing": str(scratch)},
        listing.digest.hexdigest()[:IDENTITY_CHARS],
        files=listing.files,
        skipped=listing.skipped,
        classes=tuple(class_numbers or ()),
    )


class _Listing:
    """A listing while it is being made; its rows are written at once.

    Attributes:
        offsets: for each sample, the offset of its row in bytes.
        sizes: for each sample, the space that it takes in a tar, in bytes.
        files: number of files listed or skipped.
        skipped: number of files that have no key.
        digest: hash of the keys, and of the extension, size and modification time of each member.
    """

    def __init__(self, rows: BinaryIO, class_numbers: dict[str, int] | None) -> None:
        """Begin without samples.

        Args:
            rows: the file that the rows are written to.
            class_numbers: the number of each class by the name of its folder; None to add no
                classes.
        """
        self.offsets = array("Q")
        self.sizes = array("Q")
        self.files = 0
        self.skipped = 0
        self.digest = hashlib.sha256()
        self._rows = rows
        self._class_numbers = class_numbers

    def add(self, root: Path, prefix: str, key_at: KeySplit | None) -> None:
        """Add the samples of a folder.

        Args:
            root: the folder.
            prefix: beginning of all keys; "" unless there are several folders.
            key_at: the dot before which keys end, as for `list_folders`.
        """
        for key, members in _members_by_key(root, key_at):
            self.files += len(members)
            if not key:
                self.skipped += len(members)
                continue
            class_number = None
            if self._class_numbers is not None:
                class_number = _class_number(key, self._class_numbers, root)
            self._add_sample(prefix + key, members, class_number)

    def store_order(self, folder: Path, seed: int | None) -> None:
        """Write offsets and sizes to a folder, in the order of the rows or shuffled by a seed."""
        if seed is not None:
            # Two generators with the same seed give both arrays the same order.
            random.Random(seed).shuffle(self.offsets)
            random.Random(seed).shuffle(self.sizes)
        (folder / _OFFSETS).write_bytes(self.offsets.tobytes())
        (folder / _SIZES).write_bytes(self.sizes.tobytes())

    def _add_sample(
        self,
        key: str,
        members: _Members,
        class_number: int | None,
    ) -> None:
        self.offsets.append(self._rows.tell())
        sizes = [(extension, file.size_bytes) for extension, file in members]
        if class_number is not None:
            sizes.append(("cls", len(str(class_number))))
        self.sizes.append(tar_bytes(key, sizes))
        self._rows.write(json.dumps((key, members, class_number)).encode() + b"\n")
        # The digest leaves out the files' paths, so that a run can be resumed after the folder was
        # moved.
        without_paths = [
            (extension, (file.size_bytes, file.modified_ns)) for extension, file in members
        ]
        self.digest.update(json.dumps((key, without_paths, class_number)).encode())


def _members_by_key(root: Path, key_at: KeySplit | None) -> Iterator[tuple[str, _Members]]:
    """Yield each key of a folder's files, with the members of its sample.

    The key is empty for files without a key. Raises ConfigError if the files of several samples
    would become one sample.
    """
    split = _split_at_last_dot if key_at == LAST_DOT else _split_at_first_dot
    merge_finder = MergeFinder()

    def key_of(path_and_file: tuple[str, InputFile]) -> str:
        path, _ = path_and_file
        key, _ = split(path)
        return key

    for key, group in groupby(_walk(root, "", key_at=key_at), key=key_of):
        paths = []
        extensions = []
        files = []
        for path, file in group:
            _, extension = split(path)
            paths.append(path)
            extensions.append(extension)
            files.append(file)
        if key:
            _check_not_merged(key, paths, key_at, root)
            merge_finder.add(dict(zip(extensions, paths, strict=True)))
        yield key, list(zip(extensions, files, strict=True))

    if key_at is None:
        # Only after all keys is it known that no other key has the words of two files.
        merged = merge_finder.merged_files()
        if merged is not None:
            raise _merge_error(*merged, root)


def _walk(
    folder: Path,
    prefix: str,
    ancestors: frozenset[tuple[int, int]] = frozenset(),
    *,
    key_at: KeySplit | None = None,
) -> Iterator[tuple[str, InputFile]]:
    """Yield the path of every file below the root, and the file.

    Files with the same key come one after another.

    Args:
        folder: the folder to walk.
        prefix: path of the folder below the root, with a slash at its end; empty for the root.
        ancestors: device and inode of each folder on the way from the root to this folder.
        key_at: the dot before which keys end.
    """
    try:
        status = folder.stat()
        folder_id = (status.st_dev, status.st_ino)
        if folder_id in ancestors:
            raise ConfigError(
                "this folder contains a link to itself",
                url=str(folder),
                remedy="remove the link",
            )
        ancestors |= {folder_id}
        visible = [entry for entry in os.scandir(folder) if not is_left_out(entry.name)]
        # Sorting by stem makes files with the same key neighbours. Of one stem, files come before
        # folders, so that no folder's content comes between them.
        stem_of = _stem_to_last_dot if key_at == LAST_DOT else _stem_to_first_dot
        ordered = sorted((stem_of(entry.name), entry.is_dir(), entry.name) for entry in visible)
        for _, is_folder, name in ordered:
            if is_folder:
                yield from _walk(folder / name, f"{prefix}{name}/", ancestors, key_at=key_at)
            else:
                yield f"{prefix}{name}", InputFile.at(folder / name)
    except OSError as exn:
        raise read_error(exn, Path(exn.filename or folder)) from exn


def _split_at_first_dot(path: str) -> tuple[str, str]:
    """Return the key and the extension that readers will find in a path.

    Both are empty if readers will find none.
    """
    key, extension = split_name(os.fsencode(path))
    # Readers skip `__x__` members, which describe the tar. To be safe, every path that begins with
    # `__` counts as one of them.
    if key.startswith(b"__"):
        return "", ""
    return os.fsdecode(key), os.fsdecode(extension)


def _split_at_last_dot(path: str) -> tuple[str, str]:
    """Split as `_split_at_first_dot`, but at the last dot; dots before it become underscores."""
    folder, slash, name = path.rpartition("/")
    if "." not in name:
        return "", ""
    _, _, extension = name.rpartition(".")
    return _split_at_first_dot(f"{folder}{slash}{_stem_to_last_dot(name)}.{extension}")


def _stem_to_first_dot(name: str) -> str:
    """Return what is before the first dot of a name."""
    return name.partition(".")[0]


def _stem_to_last_dot(name: str) -> str:
    """Return what is before the last dot of a name, with underscores for the other dots."""
    return name.rpartition(".")[0].replace(".", "_")


def _check_not_merged(key: str, paths: Sequence[str], key_at: KeySplit | None, root: Path) -> None:
    """Raise ConfigError if files that are probably several samples would have the same key.

    Args:
        key: the key.
        paths: paths of the files with this key, below the root.
        key_at: the dot before which keys end; None if the user has not chosen one.
        root: the folder, for the error.
    """
    if key_at == LAST_DOT:
        stems = sorted({path.rpartition(".")[0] for path in paths})
        if len(stems) > 1:
            raise ConfigError(
                f"with underscores for dots, files of two samples have the key {key!r}: "
                f"{stems[0]}, {stems[1]}",
                url=str(root),
                remedy="rename the files of one of them",
            )
        return
    if key_at is not None:  # the user has chosen the first dot, and knows what it merges
        return
    extensions = [path.removeprefix(f"{key}.") for path in paths]
    merged = find_numbered_pair(extensions)
    if merged is not None:
        first, second = (f"{key}.{extension}" for extension in merged)
        raise _merge_error(first, second, root)


def _merge_error(first: str, second: str, root: Path) -> ConfigError:
    return ConfigError(
        f"the files {first!r} and {second!r} would become one sample: its key ends at the first "
        "dot of a name",
        url=str(root),
        remedy="rename them without that dot, or pass --key-at last-dot, which writes underscores "
        "for dots in keys; if they are members of one sample, pass --key-at first-dot",
    )


def _class_names(roots: Sequence[Path]) -> list[str]:
    """Return the names of the first-level folders with samples, sorted."""
    try:
        folders = [entry for root in roots for entry in os.scandir(root) if entry.is_dir()]
    except OSError as exn:
        raise read_error(exn, Path(exn.filename)) from exn
    visible = [entry for entry in folders if not is_left_out(entry.name)]
    return sorted({entry.name for entry in visible if _has_samples(entry)})


def _has_samples(folder: os.DirEntry[str]) -> bool:
    """Return True if any file below a folder has a key."""
    for path, _ in _walk(Path(folder.path), f"{folder.name}/"):
        key, _ = _split_at_first_dot(path)
        if key:
            return True
    return False


def _class_number(key: str, class_numbers: dict[str, int], root: Path) -> int:
    """Return the number of a sample's class, which is its first-level folder.

    Raises ConfigError for a sample that is not in a class folder.
    """
    folder, slash, _ = key.partition("/")
    if not slash:
        raise ConfigError(
            f"the sample {key!r} is not in a class folder",
            url=str(root),
            remedy="move it into one, or omit --classes",
        )
    return class_numbers[folder]


def _content(file: InputFile) -> bytes:
    """Return the bytes of a file. Raises InputError if the file has changed."""
    with file.open() as opened:
        data = opened.read()
    if len(data) != file.size_bytes:
        raise InputError(
            "the file became shorter while it was being read",
            url=file.path,
            remedy="run the command again",
        )
    return data
