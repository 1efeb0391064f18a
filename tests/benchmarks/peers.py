"""Other loaders over local files, and their formats; each is imported where it is used."""

import io
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

LANCEDB_TABLE = "samples"


def webdataset(folder: str) -> Any:
    """Return webdataset's dataset over the tars of a folder, as they were written."""
    from webdataset import WebDataset

    return WebDataset(sorted(map(str, Path(folder).glob("*.tar"))), shardshuffle=False)


def litdata(folder: str, **how: Any) -> Any:
    """Return litdata's dataset over its own chunks in a folder; its samples are views of them."""
    logging.getLogger("litdata").setLevel(logging.ERROR)
    from litdata import StreamingDataset

    return StreamingDataset(folder, **how)


def write_litdata(folder: Path, items: Iterable[Any], **how: Any) -> None:
    """Write items as litdata's chunks, uncompressed, by the writer of `litdata.optimize`."""
    logging.getLogger("litdata").setLevel(logging.ERROR)
    with redirect_stdout(io.StringIO()):
        from litdata.streaming.writer import BinaryWriter

        folder.mkdir(parents=True, exist_ok=True)
        writer = BinaryWriter(str(folder), **{"chunk_bytes": "64MB", **how})
        for number, item in enumerate(items):
            writer.add_item(number, item)
        writer.done()
        writer.merge()


def mosaicml() -> Any:
    """Return MosaicML's package `streaming`, with stubs of torchvision, which it imports."""
    if "torchvision" not in sys.modules:
        import transformers.feature_extraction_utils  # noqa: F401  # first, so that it finds no torchvision

        names = {"": {}, ".datasets": {"VisionDataset": object}, ".transforms": {}}
        for name, contents in (names | {".transforms.functional": {"to_tensor": None}}).items():
            module = ModuleType(f"torchvision{name}")
            module.__spec__ = ModuleSpec(module.__name__, None)
            module.__path__ = []
            vars(module).update(contents)
            sys.modules[module.__name__] = module
    import streaming

    return streaming


def write_mosaicml(
    folder: Path, columns: dict[str, str], items: Iterable[dict[str, Any]], **how: Any
) -> None:
    with mosaicml().MDSWriter(out=str(folder), columns=columns, exist_ok=True, **how) as writer:
        for item in items:
            writer.write(item)


def write_lancedb(folder: Path, shards: Iterable[Iterable[Mapping[str, Any]]]) -> None:
    """Write samples as a table of LanceDB, a batch for each shard, with its default options."""
    import lancedb
    import pyarrow

    schema = pyarrow.schema({"key": pyarrow.string(), "jpg": pyarrow.large_binary()})

    def batches() -> Iterator[Any]:
        for shard in shards:
            rows = [{"key": sample["__key__"], "jpg": sample["jpg"]} for sample in shard]
            yield pyarrow.RecordBatch.from_pylist(rows, schema)

    lancedb.connect(str(folder)).create_table(LANCEDB_TABLE, batches(), schema)
