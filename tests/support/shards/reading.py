"""Files and samples that many tests write and read: an index file, and the keys of samples."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def write_index(folder: Path, counts: Sequence[int], name: str = "{}.tar") -> str:
    """Write the index of shards, named by number, with so many samples; return its url."""
    rows = [{"url": name.format(number), "nsamples": count} for number, count in enumerate(counts)]
    (folder / "index.json").write_text(json.dumps({"wids_version": 1, "shardlist": rows}))
    return f"file://{folder}/index.json"


def keys_of(samples: Iterable[dict[str, Any]]) -> list[str]:
    return [sample["__key__"] for sample in samples]
