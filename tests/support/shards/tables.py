"""Shards with a table of their samples' keys beside the index."""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from support.programs.cli import shardcache
from support.programs.daemon import Daemon
from support.shards.tars import Sample, make_tar


def recut(daemon: Daemon, folder: Path, samples: Sequence[Sample], counts: Sequence[int]) -> str:
    """Write shards of these sizes, an index and a table of keys; return the index's url."""
    folder.mkdir()
    for number, start in enumerate(accumulate(counts[:-1], initial=0)):
        (folder / f"{number}.tar").write_bytes(make_tar(samples[start : start + counts[number]]))
    return index_with_table(daemon, folder)


def index_with_table(daemon: Daemon, folder: Path) -> str:
    """Write the index of a folder's shards, with a table of their keys; return the index's url."""
    ran = shardcache(
        "index", f"{folder}/", "-o", folder / "index.json", "--samples", socket=daemon.socket
    )
    assert ran.code == 0, ran.err
    return f"file://{folder}/index.json"
