"""Folders of files as an input of `shardcache write`: each file is a member of a sample.

`list_folders` walks the folders once and writes a listing to a scratch folder: the key, the files
and the size of each sample. Each writer process then opens a `FolderSource` on the same listing,
and reads the files of the samples that it has to write. A sample's key is the path of its files up
to a dot of their names, so `a/17.jpg` and `a/17.txt` are members of the sample `a/17`.
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

from shardcache.errors import ConfigError, InputError
from shardcache.tarindex.grouping import split_name
from shardcache.tarindex.key_splits import LAST_DOT, KeySplit
from shardcache.writing.merged_names import RareWords, numbers_apart
from shardcache.writing.sample_tar import Sample, checked, tar_bytes
from shardcache.writing.sources import (
    IDENTITY_CHARS,
    Input,
    InputFile,
    is_left_out,
    unreadable,
)

# The files of a listing. `_LISTING` has a row of JSON for each sample, sorted: the key, the
# members, and the class number or null. A member is an extension and the values of its `InputFile`.
# The other two are tables of the rows' offsets and of the samples' sizes, in the order in which
# samples are read.
_LISTING = "listing.jsonl"
_OFFSETS = "offsets"
_SIZES = "sizes"
_NUMBER_BYTES = 8  # size of an entry of the tables


class FolderSource:
    """The samples of folders, in the order of the listing that `list_folders` made.

    The position of a sample is its number in that order.

    Args:
        listing: folder with the files of the listing.
    """

    def __init__(self, listing: str) -> None:
        self._listing = Path(listing)

    def positions(self) -> Iterator[tuple[int, int]]:
        """Yield size and position of each sample, as `Source.positions`; the sizes are exact."""
        for number, size_bytes in enumerate(array("Q", (self._listing / _SIZES).read_bytes())):
            yield size_bytes, number

    def read(self, first: int, last: int) -> Iterator[Sample]:
        """Yield samples from the files of the listing, as `Source.read`."""
        with open(self._listing / _OFFSETS, "rb") as file:
            table_bytes = _NUMBER_BYTES * (last + 1 - first)
            offsets = array("Q", os.pread(file.fileno(), table_bytes, _NUMBER_BYTES * first))
        with open(self._listing / _LISTING, "rb") as rows:
            for offset in offsets:
                rows.seek(offset)
                key, members, label = json.loads(rows.readline())
                contents = [(extension, _content(InputFile(*file))) for extension, file in members]
                if label is not None:
                    contents.append(("cls", b"%d" % label))
                yield checked(Sample(key, tuple(contents)))


def list_folders(
    roots: Sequence[Path],
    scratch: Path,
    *,
    seed: int | None,
    classes: bool,
    key_at: KeySplit | None = None,
) -> Input:
    """List the files of folders as samples. Takes 16 bytes of memory per sample.

    The key of a file's sample is the file's path below the folder, up to a dot of its name. If
    there are several folders, each key begins with the name of its folder. Files in whose names
    readers would find no key are left out and counted. Hidden files and folders, and files that
    macOS adds, are left out without being counted.

    Args:
        roots: the folders.
        scratch: folder for the listing, which has to stay there while the input is read.
        seed: seed of a random order of the samples; None to sort them.
        classes: True to add a member `cls` to each sample: the number of its folder among all
            first-level folders with samples, sorted.
        key_at: the dot before which keys end. With "last-dot", the dots before the last one become
            underscores. None means the first dot, but then it is an error if numbered files would
            become one sample.

    Raises ConfigError for two folders of the same name, a sample in no class folder, a loop of
    links, and files of several samples that would become one; InputError.
    """
    names = [root.resolve().name for root in roots]
    if len(set(names)) < len(names):
        raise ConfigError(
            "two of the folders have the same name",
            remedy="rename one, or write them separately",
        )
    labels = None
    if classes:
        labels = {name: number for number, name in enumerate(_class_names(roots))}
    with open(scratch / _LISTING, "wb") as rows:
        listing = _Listing(rows, labels)
        for root, name in zip(roots, names, strict=True):
            prefix = f"{name}/" if len(roots) > 1 else ""
            listing.add(root, prefix, key_at)
    if not listing.offsets:
        raise InputError(
            "there are no files here that readers could take for samples",
            url=str(roots[0]),
            remedy="name files KEY.EXTENSION, such as 000017.jpg",
        )
    listing.store_tables(scratch, seed)
    return Input(
        "folder",
        {"listing": str(scratch)},
        listing.digest.hexdigest()[:IDENTITY_CHARS],
        files=listing.files,
        skipped=listing.skipped,
        classes=tuple(labels or ()),
    )


class _Listing:
    """The samples of folders, as rows of a file.

    Attributes:
        offsets: for each sample, the offset of its row in bytes.
        sizes: for each sample, the space that it takes in a tar, in bytes.
        files: number of files seen.
        skipped: number of files that have no key.
        digest: hash of the keys, and of the extension, size and modification time of each member.
    """

    def __init__(self, rows: BinaryIO, labels: dict[str, int] | None) -> None:
        """Begin without samples.

        Args:
            rows: the file that the rows are written to.
            labels: the number of each class by the name of its folder; None without classes.
        """
        self.offsets = array("Q")
        self.sizes = array("Q")
        self.files = 0
        self.skipped = 0
        self.digest = hashlib.sha256()
        self._rows = rows
        self._labels = labels

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
            label = None
            if self._labels is not None:
                label = _class_number(key, self._labels, root)
            self._add_sample(prefix + key, members, label)

    def store_tables(self, folder: Path, seed: int | None) -> None:
        """Write offsets and sizes to a folder, in the order of the rows or shuffled by a seed."""
        if seed is not None:
            # Each table has a generator with the same seed, so that both get the same order.
            random.Random(seed).shuffle(self.offsets)
            random.Random(seed).shuffle(self.sizes)
        (folder / _OFFSETS).write_bytes(self.offsets.tobytes())
        (folder / _SIZES).write_bytes(self.sizes.tobytes())

    def _add_sample(
        self,
        key: str,
        members: list[tuple[str, InputFile]],
        label: int | None,
    ) -> None:
        self.offsets.append(self._rows.tell())
        sizes = [(extension, file.size_bytes) for extension, file in members]
        if label is not None:
            sizes.append(("cls", len(str(label))))
        self.sizes.append(tar_bytes(key, sizes))
        self._rows.write(json.dumps((key, members, label)).encode() + b"\n")
        # The digest leaves out the files' paths, so that a run can be resumed after the folder was
        # moved.
        facts = [(extension, (file.size_bytes, file.modified_ns)) for extension, file in members]
        self.digest.update(json.dumps((key, facts, label)).encode())


def _members_by_key(
    root: Path,
    key_at: KeySplit | None,
) -> Iterator[tuple[str, list[tuple[str, InputFile]]]]:
    """Yield each key of a folder's files, with each of its files and the file's extension.

    The key is empty for files without a key. Raises ConfigError if the files of several samples
    would become one sample.
    """
    split = _split_at_last_dot if key_at == LAST_DOT else _split
    rare_words = RareWords()

    def key_of(walked: tuple[str, InputFile]) -> str:
        path, _ = walked
        key, _ = split(path)
        return key

    for key, group in groupby(_walk(root, "", key_at=key_at), key=key_of):
        walked = list(group)
        paths = [path for path, _ in walked]
        extensions = [extension for _, extension in map(split, paths)]
        if key:
            _check_names(key, paths, key_at, root)
            rare_words.add(dict(zip(extensions, paths, strict=True)))
        files = [file for _, file in walked]
        yield key, list(zip(extensions, files, strict=True))

    if key_at is None:
        merged = rare_words.merged_files()
        if merged is not None:
            raise _merge_error(*merged, root)


def _walk(
    folder: Path,
    prefix: str,
    ancestors: frozenset[tuple[int, int]] = frozenset(),
    *,
    key_at: KeySplit | None = None,
) -> Iterator[tuple[str, InputFile]]:
    """Yield every file, with its path below the root.

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
        # Names are sorted by their stems first, and files come before folders of the same stem, so
        # that files with the same key are neighbours.
        stem_of = _stem_to_last_dot if key_at == LAST_DOT else _stem
        entries = sorted((stem_of(entry.name), entry.is_dir(), entry.name) for entry in visible)
        for _, is_folder, name in entries:
            if is_folder:
                yield from _walk(folder / name, f"{prefix}{name}/", ancestors, key_at=key_at)
            else:
                yield f"{prefix}{name}", InputFile.at(folder / name)
    except OSError as exn:
        raise unreadable(exn, Path(exn.filename or folder)) from exn


def _split(path: str) -> tuple[str, str]:
    """Return key and extension that readers will find in a member's name; both empty if none."""
    key, extension = split_name(os.fsencode(path))
    # Readers skip `__x__` members, which describe the tar. To be safe, every key that begins in
    # this way counts as none.
    if key.startswith(b"__"):
        return "", ""
    return os.fsdecode(key), os.fsdecode(extension)


def _split_at_last_dot(path: str) -> tuple[str, str]:
    """Split as `_split`, but at the last dot; dots before it become underscores."""
    folder, slash, name = path.rpartition("/")
    if "." not in name:
        return "", ""
    _, _, extension = name.rpartition(".")
    return _split(f"{folder}{slash}{_stem_to_last_dot(name)}.{extension}")


def _stem(name: str) -> str:
    """Return what is before the first dot of a name."""
    return name.partition(".")[0]


def _stem_to_last_dot(name: str) -> str:
    """Return what is before the last dot of a name, with underscores for the other dots."""
    return name.rpartition(".")[0].replace(".", "_")


def _check_names(key: str, files: Sequence[str], key_at: KeySplit | None, root: Path) -> None:
    """Raise ConfigError if files that are probably several samples would have the same key.

    Args:
        key: the key.
        files: paths of the files with this key, below the root.
        key_at: the dot before which keys end; None if the user has not chosen one.
        root: the folder, for the error.
    """
    if key_at == LAST_DOT:
        stems = sorted({file.rpartition(".")[0] for file in files})
        if len(stems) > 1:
            raise ConfigError(
                f"with underscores for dots, files of two samples have the key {key!r}: "
                f"{stems[0]}, {stems[1]}",
                url=str(root),
                remedy="rename the files of one of them",
            )
        return
    if key_at is not None:  # the user has chosen the first dot
        return
    extensions = [file.removeprefix(f"{key}.") for file in files]
    merged = numbers_apart(extensions)
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
        raise unreadable(exn, Path(exn.filename)) from exn
    visible = [entry for entry in folders if not is_left_out(entry.name)]
    return sorted({entry.name for entry in visible if _has_samples(entry)})


def _has_samples(folder: os.DirEntry[str]) -> bool:
    """Return True if any file below a folder has a key."""
    for file, _ in _walk(Path(folder.path), f"{folder.name}/"):
        key, _ = _split(file)
        if key:
            return True
    return False


def _class_number(key: str, labels: dict[str, int], root: Path) -> int:
    """Return the number of a sample's class.

    Raises ConfigError for a sample that is not in a class folder.
    """
    folder, slash, _ = key.partition("/")
    if not slash:
        raise ConfigError(
            f"the sample {key!r} is not in a class folder",
            url=str(root),
            remedy="move it into one, or omit --classes",
        )
    return labels[folder]


def _content(file: InputFile) -> bytes:
    """Return the bytes of a file. Raises InputError if the file has changed."""
    with file.open() as content:
        data = content.read()
    if len(data) != file.size_bytes:
        raise InputError(
            "the file became shorter while it was being read",
            url=file.path,
            remedy="run the command again",
        )
    return data
