"""The private daemon of notebooks, in the kernels that Jupyter starts."""

import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from support.programs.daemon import private_home
from support.programs.guard import GUARD_S
from support.shards.tars import write_shards

nbclient = pytest.importorskip("nbclient", reason="`make ecosystem` installs it")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

SHARDS = 4
SAMPLES = 5
KEYS = [f"{number:06d}" for number in range(SHARDS * SAMPLES)]

pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("default")]  # Jupyter's own

CELLS = """
from shardcache_client import ShardDataset
dataset = ShardDataset({urls!r})

print(*(sample["__key__"] for sample in dataset))

key = lambda samples: samples[0]["__key__"]
loader = dataset.loader(batch_size=1, num_workers=2, collate_fn=key)
print(*sorted(loader))
"""


def printed(urls: str) -> list[str]:
    """Run a notebook in a kernel of its own; return what each cell prints."""
    book = nbformat.v4.new_notebook()
    book.cells = [nbformat.v4.new_code_cell(cell) for cell in CELLS.format(urls=urls).split("\n\n")]
    client: Any = nbclient.NotebookClient(book, timeout=GUARD_S, kernel_name="python3")
    client.execute()
    outputs = [
        [each["text"] for each in cell.outputs if each.get("name") == "stdout"]
        for cell in book.cells
    ]
    return list(map("".join, outputs))


def test_notebooks_share_a_private_daemon_that_outlives_their_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first cell that reads starts it, and workers and the next kernel read through it."""
    monkeypatch.setenv("JUPYTER_PATH", f"{sys.prefix}/share/jupyter")
    with (
        tempfile.TemporaryDirectory(prefix="shardcache-nb-") as name,
        private_home(Path(name)) as home,
    ):
        (Path(name) / "data").mkdir()
        write_shards(Path(name) / "data", SHARDS, SAMPLES)
        daemons = []
        for _ in range(2):
            assert [text.split() for text in printed(f"{name}/data/")] == [[], KEYS, KEYS]
            daemons.append(home.pids())
        assert daemons[0] == daemons[1]
        assert len(daemons[0]) == 1
