"""reader.py: `ShardReader` gives samples, order and states of a dataset without torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import websockets

import shardcache
import shardcache_client
from shardcache_client.dataset import ShardDataset
from shardcache_client.reader import ShardReader
from support.programs.daemon import Daemon, eventually
from support.shards.reading import keys_of
from support.shards.tars import write_shards

WITHOUT_TORCH = """
import json, sys
sys.modules["torch"] = None  # an import of torch fails
from shardcache_client import ShardReader
url, socket = sys.argv[1:]
reader = ShardReader(url, shuffle=True, seed=7, socket=socket, rank=1, world_size=2)
samples = iter(reader)
first = [next(samples)["__key__"] for _ in range(30)]
state = reader.state_dict()
print(json.dumps([len(reader), first + [sample["__key__"] for sample in samples], state]))
"""


@pytest.mark.parametrize("name", shardcache_client.__all__)
def test_each_public_name_can_be_imported(name: str) -> None:
    """With torch installed; most are imported from their modules at their first use."""
    assert getattr(shardcache_client, name).__name__ == name


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("ShardDataset", "ShardReader"),
        pytest.param("Mixture", "MixtureReader", marks=pytest.mark.slow),
        pytest.param("ShardLoader", "", marks=pytest.mark.slow),
    ],
)
def test_import_of_a_dataset_without_torch_says_what_to_install(
    tmp_path: Path, name: str, instead: str
) -> None:
    """Only shardcache's own requirements are there. The error also names what needs no torch."""
    (tmp_path / "websockets").symlink_to(Path(websockets.__file__).parent)
    sources = [
        str(Path(module.__file__ or "").parents[1]) for module in (shardcache, shardcache_client)
    ]
    found = subprocess.run(
        [sys.executable, "-S", "-c", f"from shardcache_client import {name}"],
        env={"PYTHONPATH": ":".join([*sources, str(tmp_path)])},
        capture_output=True,
        text=True,
        check=False,
    )
    last = found.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: {name} needs torch: pip install torch")
    assert last.endswith(instead)


def test_a_process_without_torch_reads_what_a_dataset_would(index: str, daemon: Daemon) -> None:
    """Length, order and state are the dataset's, and each goes on where the other was."""
    dataset, resumed = (
        ShardDataset(index, shuffle=True, seed=7, socket=daemon.socket, rank=1, world_size=2)
        for _ in range(2)
    )
    expected = keys_of(dataset)
    command = [sys.executable, "-c", WITHOUT_TORCH, index, str(daemon.socket)]
    length, keys, state = json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout
    )
    assert length == len(dataset)
    assert keys == expected
    resumed.load_state_dict(state)
    assert keys_of(resumed) == expected[30:]


def test_remedies_name_only_what_a_reader_can_use(daemon: Daemon, tmp_path: Path) -> None:
    """Counts of one node do not suffice for two ranks, and only a dataset's remedy has torch."""
    urls = write_shards(tmp_path, 2, 5)
    assert len(list(ShardReader(urls, socket=daemon.socket))) == 10
    told = []
    for kind in (ShardReader, ShardDataset):
        with pytest.raises(TypeError, match="shardcache index") as caught:
            len(kind(urls, even=None, socket=daemon.socket, rank=0, world_size=2))
        told.append(str(caught.value))
    assert ["torch" in text for text in told] == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reader", "shuffle"),
    [
        pytest.param("ShardReader", True, marks=pytest.mark.slow),
        ("ShardReader", False),
        pytest.param("ShardDataset", True, marks=pytest.mark.slow),
    ],
)
def test_a_script_may_end_in_the_middle_of_an_epoch(
    reader: str, shuffle: bool, index: str, daemon: Daemon
) -> None:
    """An iterator left at the interpreter's exit prints nothing, and its session ends."""
    script = f"""
from shardcache_client import {reader}
samples = iter({reader}({index!r}, shuffle={shuffle}, socket={str(daemon.socket)!r}))
next(samples)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr == ""
    eventually(lambda: daemon.leases() == 0)
