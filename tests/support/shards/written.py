"""Written datasets, as tests look at them: with the standard library's tarfile."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

Samples = dict[str, dict[str, bytes]]


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a dataset's index."""
    found: list[dict[str, Any]] = json.loads((folder / "index.json").read_text())["shardlist"]
    return found


def samples(folder: Path) -> Samples:
    """Return the samples of all shards that the index names, by key, after checking its numbers against them."""
    found: Samples = {}
    for row in rows(folder):
        path, before = folder / row["url"], len(found)
        with tarfile.open(path) as tar:
            for info in tar:
                key, _, extension = info.name.partition(".")
                member = tar.extractfile(info)
                assert member is not None
                found.setdefault(key, {})[extension] = member.read()
        assert (row["nsamples"], row["filesize"]) == (len(found) - before, path.stat().st_size)
    return found


def shards(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every shard, by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.tar"))}
