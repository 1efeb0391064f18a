"""Ranks whose daemons list different shards: one list for all, or an error with the shard."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import joined, listed

from shardcache_client.dataset import ShardDataset
from support.network.ports import free_port
from support.programs.daemon import Daemon
from support.programs.ranks import processes
from support.shards.reading import keys_of, write_index
from support.shards.tars import make_tar, random_samples, write_indexed, write_shards

pytestmark = pytest.mark.slow

SHARDS = 4
SAMPLES = 5
COUNTS = (9, 1, 1, 3)
OLD_KEYS = [f"{number:06d}" for number in range(SHARDS * SAMPLES)]

Told = dict[str, Any]


@pytest.fixture(scope="module")
def source() -> Iterator[Path]:
    """A folder of shards with a short path."""
    with tempfile.TemporaryDirectory(prefix="shardcache-one-") as name:
        folder = Path(name, "source")
        folder.mkdir()
        write_shards(folder, SHARDS, SAMPLES)
        yield folder


@pytest.fixture(scope="module")
def nodes(source: Path) -> Iterator[list[Daemon]]:
    """Two daemons, of which the first has listed the shards before the last was written."""
    roots = [source.parent / name for name in ("old", "new")]
    for root in roots:
        root.mkdir()
    with Daemon(roots[0], "--listing-ttl-s", "3600") as old, Daemon(roots[1]) as new:
        assert len(ShardDataset(f"file://{source}/", socket=old.socket).manifest) == SHARDS
        last = source / f"shard-{SHARDS:06d}.tar"
        last.write_bytes(make_tar(random_samples(SAMPLES, first=SHARDS * SAMPLES)))
        assert len(ShardDataset(f"file://{source}/", socket=new.socket).manifest) == SHARDS + 1
        yield [old, new]


def run(
    out: Path, sockets: list[Path], when: str, workers: str, init: str, urls: str
) -> list[Told]:
    """Run a job of a rank for each socket; return what each has told."""
    port = str(free_port())
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if init == "env" else {}
    method = {"env": "env://", "tcp": f"tcp://127.0.0.1:{port}", "file": f"file://{out}/meet"}[init]
    arguments = [
        (urls, socket, when, workers, method, rank, len(sockets))
        for rank, socket in enumerate(sockets)
    ]
    return processes(listed, arguments, **env)


@pytest.mark.parametrize(("init", "workers"), [("env", "fork"), ("file", "spawn")])
def test_all_ranks_read_by_the_list_of_rank_0(
    init: str, workers: str, nodes: list[Daemon], source: Path, tmp_path: Path
) -> None:
    """All ranks share only what rank 0's node lists, if torch.distributed comes first.

    With a file to meet at, no variable names the ranks: spawned workers, which never initialise it,
    know them too.
    """
    old, new = (node.socket for node in nodes)
    told = run(tmp_path, [old, new, new], "early", workers, init, f"file://{source}/")
    assert [rank["error"] for rank in told] == [None] * 3
    assert sorted(key for rank in told for key in rank["keys"]) == OLD_KEYS


def test_ranks_draw_one_seed(nodes: list[Daemon], source: Path, tmp_path: Path) -> None:
    """The ranks' shares by `seed=None`, over the job's key-value store, hold each sample once."""
    told = run(tmp_path, [nodes[0].socket] * 2, "drawn", "fork", "file", f"file://{source}/")
    assert sorted(key for rank in told for key in rank["keys"]) == OLD_KEYS


def test_ranks_that_select_other_samples_get_an_error(
    nodes: list[Daemon], source: Path, tmp_path: Path
) -> None:
    """One of two ranks gets it before reading. Ranks with equal selections share it."""
    url = write_index(tmp_path, [SAMPLES] * SHARDS, f"{source}/shard-{{:06d}}.tar")
    sockets = [node.socket for node in nodes]
    told = run(tmp_path, sockets, "split", "none", "env", url)
    assert [rank["error"] for rank in told] == [None] * 2
    assert (
        len({key for rank in told for key in rank["keys"]})
        == sum(len(rank["keys"]) for rank in told)
        == 10
    )
    told = run(tmp_path, sockets, "astray", "fork", "tcp", url)
    errors = [rank["error"] for rank in told if rank["error"]]
    assert len(errors) == 1
    assert "ManifestMismatchError" in errors[0]
    assert "has selected other samples than rank" in errors[0]


def test_ranks_that_join_other_shards_get_an_error(
    nodes: list[Daemon], source: Path, tmp_path: Path
) -> None:
    """One of two ranks gets it before it reads, though the first source's list is shared."""
    for name in ("same", "other"):
        (tmp_path / name).mkdir()
        write_shards(tmp_path / name, SHARDS, SAMPLES)
    url = f"file://{source}/shard-{{000000..{SHARDS - 1:06d}}}.tar"

    def run_with(*partners: str) -> list[Told]:
        method = f"tcp://127.0.0.1:{free_port()}"
        ranks = enumerate(zip(nodes, partners, strict=True))
        return processes(
            joined,
            [
                (url, f"file://{tmp_path}/{each}/", node.socket, method, rank, 2)
                for rank, (node, each) in ranks
            ],
        )

    told = run_with("same", "same")
    assert [rank["error"] for rank in told] == [None] * 2
    assert sorted(key for rank in told for key in rank["keys"]) == OLD_KEYS
    [error] = [rank["error"] for rank in run_with("same", "other") if rank["error"]]
    assert "ManifestMismatchError" in error
    assert "would read different shards than rank" in error
    assert "/other/shard-000000.tar" in error


def test_a_dataset_that_rank_0_does_not_make(
    nodes: list[Daemon], source: Path, tmp_path: Path
) -> None:
    """The rank that waits in vain is told so, and how to make a dataset on one rank alone."""
    told = run(
        tmp_path, [node.socket for node in nodes], "alone", "none", "env", f"file://{source}/"
    )
    assert told[0]["error"] is None
    assert "RankTimeoutError" in told[1]["error"]
    assert "rank=0, world_size=1" in told[1]["error"]


def test_ranks_deal_alike_whatever_their_daemons_know(tmp_path: Path, nodes: list[Daemon]) -> None:
    """Both unconnected ranks deal shards, though one node's daemon has counted them all.

    Dealt samples by the one and shards by the other, the two would lose some and read others twice.
    The counts of an index file are the same for all: by them both deal samples.
    """
    knows, new = (node.socket for node in nodes)
    url = f"file://{tmp_path}/{{0..3}}.tar"
    index = write_indexed(tmp_path, COUNTS)

    def job(url: str, sockets: tuple[Path, Path], **options: Any) -> list[ShardDataset]:
        return [
            ShardDataset(url, socket=each, rank=rank, world_size=2, **options)
            for rank, each in enumerate(sockets)
        ]

    keys = keys_of(ShardDataset(url, socket=knows))
    fixed = job(url, (knows, new), samples_per_epoch=14)
    uneven = job(url, (knows, new), even=None)
    assert [ds.manifest.uncounted for ds in (*fixed, *uneven)] == [0, 4, 0, 4]
    with pytest.raises(TypeError, match="shardcache index"):
        len(uneven[0])
    read = list(map(keys_of, fixed))
    assert [len(each) for each in read] == [7, 7]
    assert set(read[0]) <= set(keys[:10])
    read = list(map(keys_of, uneven))
    assert [len(each) for each in read] == [10, 4]
    assert sorted(read[0] + read[1]) == keys
    assert list(map(keys_of, job(index, (new, knows), even=None))) == [keys[:7], keys[7:]]
