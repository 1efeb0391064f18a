"""Recognition of the format of an input."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardcache.errors import ConfigError, MissingPackageError
from shardcache.writing.folder import FolderSource, list_folders
from shardcache.writing.jsonl import SUFFIXES as _LINES
from shardcache.writing.jsonl import JsonLines
from shardcache.writing.source import HUB, Input, Json, Source, fact_of, identity_of, missing, unreadable

_PARQUET = (".parquet",)
_SAVED = ("state.json", "dataset_dict.json")


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """Options for reading an input.

    Attributes:
        field: of JSONL, the field that becomes a sample's text; None for whole lines.
        pack: of JSONL, write many lines per member.
        columns: of tables, column → extension; all columns if empty.
        split: of a dataset with splits, the one to read.
        classes: of folders, add the number of a sample's first-level folder as `cls`.
        shuffle: seed of a random order, of folders and tables; None for the input's own.
    """

    field: str | None = None
    pack: bool = False
    columns: Mapping[str, str] = dataclasses.field(default_factory=dict)
    split: str | None = None
    classes: bool = False
    shuffle: int | None = None


def recognize(names: Sequence[str], reading: Reading, scratch: Path) -> Input:
    """Return the input of these files, folders or one dataset. Blocks: folders are listed.

    Files are taken in the order of their paths. A folder with nothing but parquet or JSONL files stands for these.

    Args:
        scratch: folder for listings, which has to stay while the input is read.

    Raises:
        ConfigError: the formats are unknown or mixed, or an option does not apply to them.
        InputError: something cannot be read.
        MissingPackageError: the format needs a package that is not installed.
    """
    if any("://" in name for name in names):
        raise ConfigError(
            "inputs are local files", url=next(name for name in names if "://" in name), remedy="download them first"
        )
    paths = sorted({path for name in names for path in _files_of(name)})
    kinds = sorted({_kind(path) for path in paths})
    kind, *others = kinds
    if others:
        raise ConfigError(f"the inputs are of several kinds: {', '.join(kinds)}", remedy="write one kind at a time")
    _check(kind, reading)
    table = {"columns": dict(reading.columns), "seed": reading.shuffle}
    if kind == "folder":
        return list_folders(list(map(Path, paths)), scratch, seed=reading.shuffle, classes=reading.classes)
    if kind == "datasets":
        if len(paths) > 1:
            raise ConfigError("several datasets cannot be written at once", remedy="write them one after another")
        arguments: Json = {"name": paths[0], "split": reading.split, **table}
        with _needing(kind):
            from shardcache.writing.tables import HuggingFace

            return Input(kind, arguments, HuggingFace(**arguments).identity)
    facts = [fact_of(Path(path)) for path in paths]
    options = table if kind == "parquet" else {"field": reading.field, "pack": reading.pack}
    return Input(kind, {"files": facts, **options}, identity_of(facts))


def open_source(kind: str, arguments: Mapping[str, Any]) -> Source:
    """Return the source of an input. Blocks. Raises InputError, ConfigError, MissingPackageError."""
    if kind == "folder":
        return FolderSource(**arguments)
    if kind == "jsonl":
        return JsonLines(**arguments)
    with _needing(kind):
        from shardcache.writing.tables import HuggingFace, Parquet

        return Parquet(**arguments) if kind == "parquet" else HuggingFace(**arguments)


@contextmanager
def _needing(extra: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as exn:
        raise MissingPackageError(
            f"this input needs the Python package {exn.name}, which is not installed",
            url=extra,
            remedy=f"pip install 'shardcache[{extra}]'",
        ) from exn


def _files_of(name: str) -> list[str]:
    """Return the files that a folder of nothing else stands for; else the name itself."""
    path = Path(name)
    if name.startswith(HUB) or not path.is_dir():
        return [name]
    try:
        inside = [entry for entry in path.iterdir() if not entry.name.startswith(".")]
    except OSError as exn:
        raise unreadable(exn, path) from exn
    for suffixes in (_PARQUET, _LINES):
        if inside and all(entry.name.endswith(suffixes) for entry in inside):
            return [str(entry) for entry in inside]
    return [name]


def _kind(name: str) -> str:
    path = Path(name)
    if name.startswith(HUB) or any((path / marker).exists() for marker in _SAVED):
        return "datasets"
    if path.is_dir():
        return "folder"
    if path.name.endswith(_LINES):
        return "jsonl"
    if path.suffix in _PARQUET:
        return "parquet"
    if not path.exists():
        raise missing(path)
    raise ConfigError(
        "the format of this file is unknown",
        url=name,
        remedy="give .jsonl files (or .jsonl.gz, .zst, .bz2), .parquet files, folders, hf:NAME; or use ShardWriter",
    )


def _check(kind: str, reading: Reading) -> None:
    if reading.pack and reading.field is not None:
        raise ConfigError("--pack does not apply to a --field, which may contain line feeds", remedy="omit one of them")
    given = {
        "--field": (reading.field is not None, {"jsonl"}),
        "--pack": (reading.pack, {"jsonl"}),
        "--columns": (bool(reading.columns), {"parquet", "datasets"}),
        "--split": (reading.split is not None, {"datasets"}),
        "--classes": (reading.classes, {"folder"}),
        "--shuffle": (reading.shuffle is not None, {"folder", "parquet", "datasets"}),
    }
    for option, (is_given, kinds) in given.items():
        if is_given and kind not in kinds:
            raise ConfigError(
                f"{option} does not apply to this input ({kind})",
                remedy="ShardDataset shuffles lines when it reads them" if option == "--shuffle" else "omit it",
            )
