"""Options of a run of `shardcache write`, and recognition of the format of its input.

`recognize` turns the names on the command line into an `Input`, a description that can be sent to
other processes. In any process, `open_source` makes a `Source` from it, which yields the samples.

An input is of one of four kinds: "folder", "jsonl", "parquet" or "datasets". The last is a dataset
of Hugging Face's, either on the hub (`hf:NAME`) or saved in a local folder.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardcache.shared.exceptions import ConfigError, MissingPackageError
from shardcache.shared.protocol import Json
from shardcache.shared.tarindex.key_splits import KeySplit
from shardcache.shared.tarindex.named_members import TokenMember
from shardcache.writing import folders, sources
from shardcache.writing.json_lines import LINE_SUFFIXES, JsonLines
from shardcache.writing.shard_cuts import ShardNames

_PARQUET_SUFFIXES = (".parquet",)
_SHUFFLE_REMEDY = (
    "shuffle the lines first: shuf lines.jsonl > shuffled.jsonl; if they are not sorted, just omit "
    "--shuffle: ShardDataset(shuffle=True) mixes the samples of several shards as it reads them"
)
# A folder with any of these files is a dataset that Hugging Face's `save_to_disk` has written.
_SAVED_DATASET_FILES = ("state.json", "dataset_dict.json")


@dataclasses.dataclass(frozen=True, slots=True)
class WriteOptions:
    """Options that determine the bytes of the shards, together with the input.

    Attributes:
        shard_size_bytes: maximum size of a shard, unless a single sample is larger.
        names: pattern of the shards' names.
        tokens: the member whose tokens are counted; None to count no tokens.
        field: for JSONL, the field that becomes a sample's text; None for whole lines.
        pack: for JSONL, True to write many lines per member of the tar.
        columns: for tables, the extension of each column to write; empty for all columns.
        split: for a dataset with several splits, the split to read.
        classes: for folders, True to add the number of a sample's first-level folder as `cls`.
        key_at: for folders, the dot before which keys end, as for `folders.list_folders`.
        shuffle: for folders and tables, the seed of a random order; None for the input's order.
    """

    shard_size_bytes: int
    names: ShardNames = ShardNames()  # noqa: RUF009  # immutable
    tokens: TokenMember | None = None
    field: str | None = None
    pack: bool = False
    columns: Mapping[str, str] = dataclasses.field(default_factory=dict)
    split: str | None = None
    classes: bool = False
    key_at: KeySplit | None = None
    shuffle: int | None = None

    def for_journal(self, input_: sources.Input) -> Json:
        """Return everything that the bytes of the shards depend on, for the journal.

        An interrupted run is resumed only if its journal has the same values.
        """
        tokens = None if self.tokens is None else str(self.tokens)
        values = dataclasses.asdict(self) | {"names": self.names.pattern, "tokens": tokens}
        return {"input": f"{input_.kind} {input_.identity}", **values}


def recognize(names: Sequence[str], options: WriteOptions, scratch: Path) -> sources.Input:
    """Return the input that the user has named.

    Blocks while folders are listed. Files are taken in the order of their paths. A folder that has
    only parquet files, or only JSONL files, stands for its files.

    Args:
        names: paths, or one `hf:NAME`.
        options: the run's options.
        scratch: folder for the listing of folders; it has to stay while the input is read.

    Raises:
        ConfigError: the formats are unknown or mixed, or an option does not apply to them.
        InputError: a file or folder cannot be read.
        MissingPackageError: the input needs a package that is not installed.
    """
    for name in names:
        if "://" in name:
            raise ConfigError("inputs must be local files", url=name, remedy="download them first")
    distinct_paths: set[str] = set()
    for name in names:
        distinct_paths.update(_files_of(name))
    paths = sorted(distinct_paths)
    kinds = sorted({_kind(path) for path in paths})
    if len(kinds) > 1:
        raise ConfigError(
            f"the inputs are of several kinds: {', '.join(kinds)}",
            remedy="write one kind at a time",
        )
    kind = kinds[0]
    _check_options(kind, options)

    if kind == "folder":
        return folders.list_folders(
            [Path(path) for path in paths],
            scratch,
            seed=options.shuffle,
            add_classes=options.classes,
            key_at=options.key_at,
        )
    if kind == "datasets":
        return _dataset_input(paths, options)
    return _files_input(kind, paths, options)


def _dataset_input(paths: Sequence[str], options: WriteOptions) -> sources.Input:
    """Return the input for one Hugging Face dataset. Raises ConfigError for several."""
    if len(paths) > 1:
        raise ConfigError(
            "several datasets cannot be written at once",
            remedy="write them one after another",
        )
    arguments: Json = {
        "name": paths[0],
        "split": options.split,
        "columns": dict(options.columns),
        "seed": options.shuffle,
    }
    with _importing_extra("datasets"):
        from shardcache.writing.row_tables import HuggingFace

        identity = HuggingFace(**arguments).identity
        return sources.Input("datasets", arguments, identity, files=0)  # 0 for an unknown number


def _files_input(kind: str, paths: Sequence[str], options: WriteOptions) -> sources.Input:
    """Return the input for files of the kind "parquet" or "jsonl"."""
    input_files = [sources.InputFile.at(Path(path)) for path in paths]
    # The identity has the files' names without their folders, so that a run can be resumed after
    # the files were moved.
    without_folders = [file._replace(path=Path(file.path).name) for file in input_files]
    digest = hashlib.sha256(json.dumps(without_folders).encode()).hexdigest()
    identity = digest[: sources.IDENTITY_CHARS]
    arguments: Json = {"files": input_files}
    if kind == "parquet":
        arguments["columns"] = dict(options.columns)
        arguments["seed"] = options.shuffle
    else:
        arguments["field"] = options.field
        arguments["pack"] = options.pack
    return sources.Input(kind, arguments, identity, files=len(input_files))


def open_source(kind: str, arguments: Mapping[str, Any]) -> sources.Source:
    """Return the source of the samples of an `Input`, given its kind and arguments. Blocks.

    Raises InputError, ConfigError, MissingPackageError.
    """
    if kind == "folder":
        return folders.FolderSource(**arguments)
    if kind == "jsonl":
        return JsonLines(**arguments)
    with _importing_extra(kind):
        from shardcache.writing.row_tables import HuggingFace, Parquet

        if kind == "parquet":
            return Parquet(**arguments)
        return HuggingFace(**arguments)


@contextmanager
def _importing_extra(extra: str) -> Iterator[None]:
    """Turn a failed import of a package into an error that names the extra to install."""
    try:
        yield
    except ModuleNotFoundError as exn:
        raise MissingPackageError(
            f"this input needs the Python package {exn.name}, which is not installed",
            url=extra,
            remedy=f"pip install 'shardcache[{extra}]'",
        ) from exn


def _files_of(name: str) -> list[str]:
    """Return the files in a folder that has only parquet files, or only JSONL files.

    For any other folder, a file or a dataset, return just its name.
    """
    path = Path(name)
    if name.startswith(sources.HUB_PREFIX) or not path.is_dir():
        return [name]
    try:
        entries = [entry for entry in path.iterdir() if not sources.is_left_out(entry.name)]
    except OSError as exn:
        raise sources.read_error(exn, path) from exn
    for suffixes in (_PARQUET_SUFFIXES, LINE_SUFFIXES):
        if entries and all(entry.name.endswith(suffixes) for entry in entries):
            return [str(entry) for entry in entries]
    return [name]


def _kind(name: str) -> str:
    """Return the kind of the input at a path, or of `hf:NAME`.

    Raises ConfigError for a file of an unknown format, InputError if nothing is at the path.
    """
    path = Path(name)
    is_saved_dataset = any((path / file).exists() for file in _SAVED_DATASET_FILES)
    if name.startswith(sources.HUB_PREFIX) or is_saved_dataset:
        return "datasets"
    if path.is_dir():
        return "folder"
    if path.name.endswith(LINE_SUFFIXES):
        return "jsonl"
    if path.suffix in _PARQUET_SUFFIXES:
        return "parquet"
    if not path.exists():
        raise sources.missing_error(path)
    raise ConfigError(
        "the format of this file is unknown",
        url=name,
        remedy="give .jsonl files (or .jsonl.gz, .zst, .bz2), .parquet files, folders, hf:NAME; "
        "or use ShardWriter",
    )


def _check_options(kind: str, options: WriteOptions) -> None:
    """Raise ConfigError for an option that applies only to other kinds of input."""
    if options.pack and options.field is not None:
        raise ConfigError(
            "--pack cannot be combined with --field, whose text may contain line feeds",
            remedy="omit one of them",
        )
    # For each option: True if it was given, and the kinds of input to which it applies.
    restricted_options = {
        "--field": (options.field is not None, {"jsonl"}),
        "--pack": (options.pack, {"jsonl"}),
        "--columns": (bool(options.columns), {"parquet", "datasets"}),
        "--split": (options.split is not None, {"datasets"}),
        "--classes": (options.classes, {"folder"}),
        "--key-at": (options.key_at is not None, {"folder"}),
        "--shuffle": (options.shuffle is not None, {"folder", "parquet", "datasets"}),
    }
    for option, (is_given, allowed_kinds) in restricted_options.items():
        if is_given and kind not in allowed_kinds:
            remedy = _SHUFFLE_REMEDY if option == "--shuffle" else "omit it"
            raise ConfigError(f"{option} does not apply to this input ({kind})", remedy=remedy)
