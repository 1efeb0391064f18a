"""Recognition of the format of an input."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardcache.errors import ConfigError, InputError, MissingPackageError
from shardcache.writing.sources.jsonl import SUFFIXES as _LINES
from shardcache.writing.sources.jsonl import JsonLines
from shardcache.writing.sources.source import Json, Source, fact_of, identity_of, missing, unreadable

_HUB = "hf:"
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
        seed: seed of a random order, of folders and tables; None for the input's own.
    """

    field: str | None = None
    pack: bool = False
    columns: Mapping[str, str] = dataclasses.field(default_factory=dict)
    split: str | None = None
    classes: bool = False
    seed: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Input:
    """An input whose format is known.

    Attributes:
        kind: "folder", "jsonl", "parquet" or "datasets".
        arguments: of the `Source`, as JSON, for any process.
        identity: short name of its contents, as far as names, sizes and modification times tell.
        skipped: number of files that belong to no sample.
        classes: names of the classes, by number.
    """

    kind: str
    arguments: Json
    identity: str
    skipped: int = 0
    classes: tuple[str, ...] = ()

    def open(self) -> Source:
        """Open it for reading. Blocks. Raises InputError, ConfigError, MissingPackageError."""
        return open_source(self.kind, self.arguments)


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
    paths = [path for name in names for path in _files_of(name)]
    kinds = sorted({_kind(path) for path in paths})
    if len(kinds) != 1:
        raise ConfigError(
            f"the inputs are of several kinds: {', '.join(kinds)}", remedy="write them one kind at a time"
        )
    (kind,) = kinds
    _check(kind, reading)
    if kind == "folder":
        found = _folders(paths, reading, scratch)
    elif kind == "datasets":
        found = _dataset(paths, reading)
    else:
        facts = [fact_of(Path(path)) for path in sorted(set(paths))]
        lines = {"field": reading.field, "pack": reading.pack}
        table = {"columns": dict(reading.columns), "seed": reading.seed}
        found = Input(kind, {"files": facts, **(lines if kind == "jsonl" else table)}, identity_of(facts))
    return found


def _folders(paths: Sequence[str], reading: Reading, scratch: Path) -> Input:
    from shardcache.writing.sources.folder import list_folders

    listed = list_folders(
        [Path(path) for path in sorted(set(paths))], scratch, seed=reading.seed, classes=reading.classes
    )
    if not listed["samples"]:
        raise InputError(
            "there are no files here that readers could take for samples",
            url=paths[0],
            remedy="name files KEY.EXTENSION, such as 000017.jpg",
        )
    arguments = {"listing": listed["listing"]}
    return Input("folder", arguments, listed["identity"], listed["skipped"], tuple(listed["classes"]))


def _dataset(paths: Sequence[str], reading: Reading) -> Input:
    if len(paths) > 1:
        raise ConfigError("several datasets cannot be written at once", remedy="write them one after another")
    arguments: Json = {"name": paths[0], "split": reading.split, "columns": dict(reading.columns), "seed": reading.seed}
    with _needing("datasets", paths[0]):
        from shardcache.writing.sources.hugging_face import HuggingFace

        return Input("datasets", arguments, HuggingFace(**arguments).identity)


def open_source(kind: str, arguments: Mapping[str, Any]) -> Source:
    """Return the source of an input of this kind. Raises as `Input.open`."""
    if kind == "folder":
        from shardcache.writing.sources.folder import FolderSource

        return FolderSource(**arguments)
    if kind == "jsonl":
        return JsonLines(**arguments)
    if kind == "parquet":
        with _needing("pyarrow", kind):
            from shardcache.writing.sources.parquet import Parquet

            return Parquet(**arguments)
    with _needing("datasets", kind):
        from shardcache.writing.sources.hugging_face import HuggingFace

        return HuggingFace(**arguments)


@contextmanager
def _needing(package: str, url: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as exn:
        raise MissingPackageError(
            f"this input needs the Python package {exn.name}, which is not installed",
            url=url,
            remedy=f"pip install 'shardcache[{'parquet' if package == 'pyarrow' else package}]'",
        ) from exn


def _files_of(name: str) -> list[str]:
    """Return the files that a folder of nothing else stands for; else the name itself."""
    path = Path(name)
    if name.startswith(_HUB) or not path.is_dir():
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
    if name.startswith(_HUB) or any((path / marker).exists() for marker in _SAVED):
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
        "--shuffle": (reading.seed is not None, {"folder", "parquet", "datasets"}),
    }
    for option, (is_given, kinds) in given.items():
        if is_given and kind not in kinds:
            raise ConfigError(
                f"{option} does not apply to this input ({kind})",
                remedy="ShardDataset shuffles lines when it reads them" if option == "--shuffle" else "omit it",
            )
