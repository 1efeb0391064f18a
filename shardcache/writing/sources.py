"""Inputs that shards are made from, and two of them: folders of files, and files of lines."""

import hashlib
import json
import os
import random
import stat
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

from shardcache.errors import ConfigError, InputError, ShardError, did_you_mean
from shardcache.protocol import Json
from shardcache.store.codecs import Codec, codec_errors
from shardcache.tarindex.grouping import FOLDER, is_of_macos, split_name
from shardcache.writing.merged_names import RareWords, numbers_apart
from shardcache.writing.shards import Sample, checked, member_bytes, tar_bytes, utf8

HUB = "hf:"
"""Prefix of a dataset's name on Hugging Face's hub."""

KeyAt = Literal["first-dot", "last-dot"]
"""The dot of a file's name before which its key ends."""

Position = Any
"""A place in the input, as JSON: a tuple arrives as a list in another process."""

FileFact = tuple[str, int, int]
"""A file of the input: its path, size in bytes and modification time in nanoseconds, for noticing that it changed."""


class Source(Protocol):
    """Samples in a fixed order, any stretch of which can be read in another process. Both methods block.

    Constructed from a JSON object, the `arguments` of an `Input`.
    """

    def positions(self) -> Iterator[tuple[int, Position]]:
        """Yield the size in a tar, in bytes, and the position of each sample, in order.

        The size may be an estimate, if it is the same one each time. Raises InputError.
        """

    def read(self, first: Position, last: Position) -> Iterator[Sample]:
        """Yield the samples from one position to another, which is included.

        Raises InputError for a file that is malformed or has changed, SampleError.
        """


@dataclass(frozen=True, slots=True)
class Input:
    """An input whose format is known."""

    kind: str  # "folder", "jsonl", "parquet" or "datasets"
    arguments: Json  # of the `Source`, for any process
    identity: str  # short name of its contents, as far as names, sizes and modification times tell
    files: int  # number of its files; 0 if unknown
    skipped: int = 0  # number of files that belong to no sample
    classes: tuple[str, ...] = ()  # their names, by number


def fact_of(path: Path) -> FileFact:
    """Return the facts of a regular file. Raises InputError for anything else."""
    try:
        found = path.stat()
    except OSError as exn:
        raise unreadable(exn, path) from exn
    if not stat.S_ISREG(found.st_mode):
        raise InputError(
            "it is no regular file, but a pipe, socket or device",
            url=str(path),
            remedy="write its content to a file, or remove it from the folder",
        )
    return str(path), found.st_size, found.st_mtime_ns


def open_unchanged(fact: Sequence[Any]) -> BinaryIO:
    """Open a file of the input. Raises InputError if it is not the file that it was when the run began."""
    path, size_bytes, mtime_ns = fact
    try:
        file = open(path, "rb", buffering=1024**2)  # noqa: SIM115  # the caller closes it
    except OSError as exn:
        raise unreadable(exn, Path(path)) from exn
    found = os.fstat(file.fileno())
    if (found.st_size, found.st_mtime_ns) != (size_bytes, mtime_ns):
        file.close()
        remedy = "wait until nothing writes to it; then empty the destination, and start again"
        raise InputError("the file changed while shards were being written from it", url=path, remedy=remedy)
    return file


def missing(path: Path) -> InputError:
    """Return the error for a file or folder that does not exist, with one that may have been meant."""
    if any(sign in str(path) for sign in "*?["):
        return InputError("no file matches", url=str(path), remedy=f"give the folder itself: {path.parent}")
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return InputError("there is no such folder", url=str(path.parent), remedy="check the path")
    same = [name for name in names if Path(name).stem == path.stem]
    hint = did_you_mean(path.name, same or names, 0 if same else 0.6)
    return InputError(f"there is no such file or folder{hint}", url=str(path), remedy="check the path")


def unreadable(exn: OSError, path: Path) -> InputError:
    """Return the error for a file or folder that cannot be read."""
    if isinstance(exn, FileNotFoundError):
        return missing(path)
    remedy = "check the path and the permissions of this user"
    return InputError(f"cannot read it ({exn.strerror})", url=str(path), remedy=remedy)


# Folders

_LISTING, _OFFSETS, _SIZES = "listing.jsonl", "offsets", "sizes"


class FolderSource:
    """The samples of folders, in the order of the listing that `list_folders` made; a position is a number."""

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
                yield checked(Sample(key, (*found, *([] if label is None else [("cls", b"%d" % label)]))))


def list_folders(
    roots: Sequence[Path], scratch: Path, *, seed: int | None, classes: bool, key_at: KeyAt | None = None
) -> Input:
    """List the files of folders, sorted, or shuffled by a seed.

    A file belongs to the sample of its path below the folder up to the first dot of its name, as readers split it; with
    `key_at` "last-dot" up to the last one, and dots before that become underscores. The paths of several folders begin
    with the folder's name. Files without such a key, as readers split names, are left out and counted; hidden files and
    folders, and what macOS adds, are left out. With `classes`, each sample gets a member `cls`: the number of its
    folder among all first-level folders with samples, sorted. The listing, in the folder `scratch`, has to stay.
    Memory: 16 bytes per sample.

    Raises ConfigError for folders of one name, a sample below no class, a loop of links, and without `key_at` for
    numbered files that would become one sample; InputError.
    """
    names = [root.resolve().name for root in roots]
    if len(set(names)) < len(names):
        raise ConfigError("two of the folders have the same name", remedy="rename one, or write them separately")
    labels = {name: number for number, name in enumerate(_class_names(roots))} if classes else {}
    offsets, sizes, skipped, digest = array("Q"), array("Q"), 0, hashlib.sha256()
    count = 0  # of files
    with open(scratch / _LISTING, "wb") as rows:
        for root, name in zip(roots, names, strict=True):
            prefix = f"{name}/" if len(roots) > 1 else ""
            for key, members in _members_by_key(root, key_at):
                count += len(members)
                if not key:
                    skipped += len(members)
                    continue
                label = _label(key, labels, root) if classes else None
                offsets.append(rows.tell())
                cls = [] if label is None else [("cls", len(str(label)))]
                sizes.append(tar_bytes(prefix + key, [(extension, fact[1]) for extension, fact in members] + cls))
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
    return Input("folder", {"listing": str(scratch)}, digest.hexdigest()[:16], count, skipped, tuple(labels))


def _members_by_key(root: Path, key_at: KeyAt | None) -> Iterator[tuple[str, list[tuple[str, FileFact]]]]:
    """Yield each key of a folder's files, with extension and facts of each; an empty key for files without one."""
    split = _split_at_last_dot if key_at == "last-dot" else _split
    words = RareWords()
    for key, group in groupby(_walk(root, "", key_at=key_at), key=lambda file: split(file[0])[0]):
        files = list(group)
        if key:
            _check_names(key, [file for file, _ in files], key_at, root)
            words.add({split(file)[1]: file for file, _ in files})
        yield key, [(split(file)[1], fact) for file, fact in files]

    merged = words.found()
    if merged is not None and key_at is None:
        raise _merging(*merged, root)


def _walk(
    folder: Path, below: str, above: frozenset[tuple[int, int]] = frozenset(), *, key_at: KeyAt | None = None
) -> Iterator[tuple[str, FileFact]]:
    """Yield the path below the root, and the facts, of every file, so that files with the same key come together."""
    try:
        here = folder.stat()
        if (here.st_dev, here.st_ino) in above:
            raise ConfigError("this folder contains a link to itself", url=str(folder), remedy="remove the link")
        above |= {(here.st_dev, here.st_ino)}
        entries = [(entry.is_dir(), entry.name) for entry in os.scandir(folder) if not is_left_out(entry.name)]
        stem_of = _stem_to_last_dot if key_at == "last-dot" else _stem
        for is_folder, name in sorted(entries, key=lambda entry: (stem_of(entry[1]), entry)):
            if is_folder:
                yield from _walk(folder / name, f"{below}{name}/", above, key_at=key_at)
            else:
                yield f"{below}{name}", fact_of(folder / name)
    except OSError as exn:
        raise unreadable(exn, Path(exn.filename or folder)) from exn


def is_left_out(name: str) -> bool:
    """Return True for a file or folder of an input that is no data: hidden, or added by macOS."""
    return name.startswith(".") or is_of_macos(os.fsencode(name))


def _split(path: str) -> tuple[str, str]:
    """Return key and extension that readers will find in a member's name; empty if they will find none."""
    key, extension = split_name(os.fsencode(path))
    return ("", "") if key.startswith(b"__") else (os.fsdecode(key), os.fsdecode(extension))


def _split_at_last_dot(path: str) -> tuple[str, str]:
    """Return the key up to the last dot, with underscores for those before, and the extension, as `_split` does."""
    folder, slash, name = path.rpartition("/")
    extension = name.rpartition(".")[2]
    return _split(f"{folder}{slash}{_stem_to_last_dot(name)}.{extension}") if "." in name else ("", "")


def _stem(name: str) -> str:
    return name.partition(".")[0]


def _stem_to_last_dot(name: str) -> str:
    return name.rpartition(".")[0].replace(".", "_")


def _check_names(key: str, files: Sequence[str], key_at: KeyAt | None, root: Path) -> None:
    """Raise ConfigError if files that are probably samples of their own would become one."""
    if key_at == "last-dot":
        stems = sorted({file.rpartition(".")[0] for file in files})
        if len(stems) > 1:
            raise ConfigError(
                f"with underscores for dots, files of two samples have the key {key!r}: {stems[0]}, {stems[1]}",
                url=str(root),
                remedy="rename the files of one of them",
            )
        return
    if key_at is not None:
        return
    merged = numbers_apart([file[len(key) + 1 :] for file in files])
    if merged is not None:
        one, other = (f"{key}.{extension}" for extension in merged)
        raise _merging(one, other, root)


def _merging(one: str, other: str, root: Path) -> ConfigError:
    return ConfigError(
        f"the files {one!r} and {other!r} would become one sample: its key ends at the first dot of a name",
        url=str(root),
        remedy="rename them without that dot, or pass --key-at last-dot, which writes underscores for dots in "
        "keys; if they are members of one sample, pass --key-at first-dot",
    )


def _class_names(roots: Sequence[Path]) -> list[str]:
    """Return the names of the first-level folders with samples, sorted."""
    try:
        folders = [entry for root in roots for entry in os.scandir(root) if entry.is_dir()]
    except OSError as exn:
        raise unreadable(exn, Path(exn.filename)) from exn
    return sorted({entry.name for entry in folders if not is_left_out(entry.name) and _has_samples(entry)})


def _has_samples(folder: os.DirEntry[str]) -> bool:
    return any(_split(file)[0] for file, _ in _walk(Path(folder.path), f"{folder.name}/"))


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


# Lines

_CODECS = {".gz": Codec.GZIP, ".zst": Codec.ZSTD, ".bz2": Codec.BZIP2}
LINE_SUFFIXES = tuple(name + compression for name in (".jsonl", ".ndjson") for compression in ("", *_CODECS))
_KEY = "%09d"
_LINE_NAME_BYTES = len("000000000.json")
_BLOCK_BYTES = 1024**2
_MIN_BYTES = 64  # what a line's entry in the index takes on a reader's disk


class JsonLines:
    """The lines of JSONL files, one after another; a position is (file, offset in bytes, number of the line).

    Each line becomes a sample, whose key is its number. Lines are counted from 0 through all files. Blank lines are
    counted, and skipped. A compressed file stays open after reading from it: reads whose positions ascend decompress it
    once, as no offset in it can be reached otherwise.

    Args:
        files: facts of each file.
        field: if given, each sample is the text of this field as `txt`, otherwise the line, unchanged, as `json`.
        pack: write members of many lines, instead of a member for each.
    """

    def __init__(self, files: Sequence[Sequence[Any]], field: str | None, pack: bool) -> None:
        self._files = files
        self._field = field
        self._pack = pack
        self._inflated: tuple[int, BinaryIO] | None = None  # the compressed file read last, by number

    def positions(self) -> Iterator[tuple[int, tuple[int, int, int]]]:
        """As `Source.positions`; sizes are those of the lines, of which the field is a part, or a little more."""
        number = 0
        for file in range(len(self._files)):
            at = 0
            with self._opened(file, at) as lines:
                for line in lines:
                    size_bytes = len(line)
                    if not line.isspace():
                        yield self._space(size_bytes), (file, at, number)
                    at += size_bytes
                    number += 1

    def read(self, first: Sequence[int], last: Sequence[int]) -> Iterator[Sample]:
        """As `Source.read`."""
        lines = self._lines(first, last)
        if self._pack:
            yield from _packed(lines)
            return
        for number, line, path in lines:
            if not line.isspace():
                yield Sample(_KEY % number, (self._member(line, number, path),))

    def _space(self, line_bytes: int) -> int:
        """Return the space of a line in a shard; packed, with its share of a block's header and padding."""
        if self._pack:
            return max(_MIN_BYTES, line_bytes + line_bytes // 512 + 1)
        return member_bytes(_LINE_NAME_BYTES, line_bytes)

    def _lines(self, first: Sequence[int], last: Sequence[int]) -> Iterator[tuple[int, bytes, str]]:
        """Yield number, line and file of each line from one position to another, blank lines included."""
        file, at, number = first
        for each in range(file, last[0] + 1):
            with self._opened(each, at) as lines:
                for line in lines:
                    yield number, line, self._files[each][0]
                    if number == last[2]:
                        return
                    number += 1
            at = 0

    @contextmanager
    def _opened(self, file: int, at: int) -> Iterator[BinaryIO]:
        """Yield the lines of a file from an offset. Raises InputError."""
        fact = self._files[file]
        codec = _CODECS.get(Path(fact[0]).suffix.lower())
        if codec is None:
            with open_unchanged(fact) as lines:
                lines.seek(at)
                yield lines
            return
        if self._inflated is None or self._inflated[0] != file:
            if self._inflated is not None:
                self._inflated[1].close()
            open_unchanged(fact).close()
            self._inflated = file, codec.open(Path(fact[0]))
        try:
            with codec_errors(codec, fact[0]):
                self._inflated[1].seek(at)
                yield self._inflated[1]
        except ShardError as exn:
            raise InputError(exn.message, url=fact[0], remedy="compress the file again, or leave it out") from exn

    def _member(self, line: bytes, number: int, path: str) -> tuple[str, bytes]:
        if self._field is None:
            return "json", line.rstrip(b"\r\n")
        try:
            text = json.loads(line)[self._field]
            if isinstance(text, str):
                return "txt", utf8(text)
            reason = f"its {self._field!r} is not a text"
        except (KeyError, TypeError):
            reason = f"it has no field {self._field!r}"
        except ValueError as exn:
            reason = f"it is not JSON ({exn})"
        raise InputError(
            f"line {number:,}, counted from 0 through all files, cannot be used: {reason}",
            url=path,
            remedy="correct the line, or write whole lines, without --field",
        )


def _packed(lines: Iterator[tuple[int, bytes, str]]) -> Iterator[Sample]:
    """Yield lines in blocks of about a mebibyte; blank ones as empty ones, which readers count and leave out."""
    for first, line, _ in lines:
        block, size_bytes = [line], len(line)
        while size_bytes < _BLOCK_BYTES and (following := next(lines, None)) is not None:
            block.append(following[1])
            size_bytes += len(following[1])
        texts = [b"" if each.isspace() else each.rstrip(b"\r\n") for each in block]
        yield Sample(f"{FOLDER}/{_KEY % first}", (("json", b"\n".join(texts) + b"\n"),), sum(map(bool, texts)))
