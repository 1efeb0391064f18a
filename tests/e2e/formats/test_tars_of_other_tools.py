"""Tars that other tools make: linked files, members of macOS, samples in pieces."""

import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from shardcache.errors import TornSampleError
from shardcache_client import ignore_and_continue
from shardcache_client.dataset import Mixture, ShardDataset
from shardcache_client.reader import ShardReader
from shardcache_client.webdataset import WebDataset
from support.programs.cli import shardcache
from support.programs.daemon import Daemon
from support.shards.reading import write_index

pytestmark = pytest.mark.skipif(shutil.which("tar") is None, reason="needs GNU tar")


def make_files(folder: Path, files: dict[str, bytes]) -> Path:
    """Write files below a folder, and return it."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def run_tar(folder: Path, shard: Path, *args: str) -> str:
    """Pack or append files of a folder by GNU tar, in the order given; return the shard's url."""
    subprocess.run(["tar", "-C", folder, "-f", shard, *args], check=True)
    return f"file://{shard}"


def test_hard_link_has_the_content_of_its_file(daemon: Daemon, tmp_path: Path) -> None:
    """Files that `cp -al` or a deduplicator linked: each sample has all its members."""
    folder = make_files(tmp_path / "files", {"0.jpg": b"one image", "0.cls": b"0", "1.cls": b"1"})
    (folder / "1.jpg").hardlink_to(folder / "0.jpg")
    url = run_tar(folder, tmp_path / "linked.tar", "--sort=name", "-c", ".")
    samples = list(ShardReader(url, socket=daemon.socket))
    assert [(sample["jpg"], sample["cls"]) for sample in samples] == [
        (b"one image", b"0"),
        (b"one image", b"1"),
    ]
    indexed = ShardDataset(url, socket=daemon.socket).indexed()
    assert indexed[1]["jpg"] == b"one image"


def test_members_of_macos_are_no_samples(daemon: Daemon, tmp_path: Path) -> None:
    """AppleDouble files and folders amid a sample, as macOS packs them, leave it whole."""
    names = [
        "d/.DS_Store",
        "d/._0.cls",
        "d/0.cls",
        "d/._0.jpg",
        "d/0.jpg",
        "__MACOSX/d/._0.jpg",
        "__MACOSX/d/1.jpg",
    ]
    folder = make_files(tmp_path / "files", dict.fromkeys(names, b"1"))
    url = run_tar(folder, tmp_path / "mac.tar", "-c", *names)
    samples = list(ShardReader(url, socket=daemon.socket))
    assert [set(sample) for sample in samples] == [{"__key__", "__url__", "cls", "jpg"}]
    assert samples[0]["__key__"] == "d/0"


@pytest.fixture
def torn(tmp_path: Path) -> str:
    """A shard of three samples, whose labels were appended later; its url."""
    names = [f"000{number}.{extension}" for extension in ("jpg", "cls") for number in range(3)]
    folder = make_files(tmp_path / "files", dict.fromkeys(names, b"1"))
    run_tar(folder, tmp_path / "torn.tar", "-c", *names[:3])
    return run_tar(folder, tmp_path / "torn.tar", "-r", *names[3:])


READERS: dict[str, Callable[[str, Path], Iterable[object]]] = {
    "ShardDataset": lambda url, socket: ShardDataset(url, socket=socket),
    "missing": lambda url, socket: ShardDataset(
        url, socket=socket, missing="skip", decode={"cls": int}
    ),
    "whole shards": lambda url, socket: ShardDataset(url, socket=socket, partial_reads=False),
    "ShardReader": lambda url, socket: ShardReader(url, socket=socket),
    "webdataset": lambda url, socket: WebDataset(url, shardshuffle=False, socket=socket),
    "Mixture": lambda url, socket: Mixture({"a": ShardDataset(counted(url), socket=socket)}),
    "indexed": lambda url, socket: ShardDataset(counted(url), socket=socket).indexed(),
}


def counted(url: str) -> str:
    """Return the url of an index file that another tool made, in which each part is a sample."""
    path = Path(url.removeprefix("file://"))
    return write_index(path.parent, [6], path.name)


@pytest.mark.parametrize("door", READERS)
def test_torn_samples_are_an_error_at_every_door(daemon: Daemon, torn: str, door: str) -> None:
    """Not six samples of half the members; a default for missing members hides nothing."""
    with pytest.raises(
        TornSampleError, match="'0000' appears again, with the member 'cls' at byte 3584"
    ) as caught:
        list(READERS[door](torn, daemon.socket))
    assert caught.value.url == torn
    assert "tar --sort=name" in caught.value.remedy


def test_index_of_torn_samples_is_not_written(daemon: Daemon, torn: str, tmp_path: Path) -> None:
    """`index` names the shard, the key and the remedy, and exits 1; `warm` does, too."""
    ran = shardcache("index", torn, "-o", tmp_path / "index.json", socket=daemon.socket)
    assert ran.code == 1
    assert not (tmp_path / "index.json").exists()
    printed = ran.out + ran.err
    assert "'0000' appears again" in printed
    assert "tar --sort=name" in printed
    assert shardcache("warm", torn, socket=daemon.socket).code == 1


@pytest.mark.slow
def test_refused_shard_is_counted_and_named(torn: str, tmp_path: Path) -> None:
    """All of `status`, `doctor`, `verify` and the metrics name it until it is packed anew."""
    with Daemon(tmp_path) as daemon:
        shardcache("warm", torn, socket=daemon.socket)
        status = shardcache("status", "--json", socket=daemon.socket).json
        assert status["counters"]["refused"] == 1
        assert [(error["url"], error["code"]) for error in status["refused"]] == [
            (torn, "torn_sample")
        ]
        assert "refused 1" in shardcache("status", socket=daemon.socket).out
        found = shardcache("doctor", "--quick", "--json", "--socket", daemon.socket).json[
            "findings"
        ]
        [refused] = [finding for finding in found if finding["check"] == "daemon.refused"]
        assert refused["found"] == f"1 shard refused on arrival, last {torn}"
        assert "'0000' appears again" in refused["cause"]
        assert "tar --sort=name" in refused["remedy"]
        assert "0 corrupt; 1 refused" in shardcache("verify", socket=daemon.socket).out
        assert b"shardcache_refused_shards_total 1.0" in daemon.request("GET", "/metrics")
        run_tar(tmp_path / "files", tmp_path / "torn.tar", "--sort=name", "-c", ".")
        shardcache("warm", torn, socket=daemon.socket)
        assert shardcache("status", "--json", socket=daemon.socket).json["refused"] == []
        assert "0 refused" in shardcache("verify", socket=daemon.socket).out


def test_parts_of_samples_are_given_where_the_config_says_so(torn: str, tmp_path: Path) -> None:
    """`require_adjacent = false` in an [[origin]] table makes samples of the parts."""
    config = tmp_path / "shardcache.toml"
    config.write_text(f'[[origin]]\nmatch = "file://{tmp_path}/"\nrequire_adjacent = false\n')
    with Daemon(tmp_path, "--config", str(config)) as lenient:
        samples = list(ShardReader(torn, socket=lenient.socket))
    assert [(sample["__key__"], "jpg" in sample) for sample in samples] == [
        ("0000", True),
        ("0001", True),
        ("0002", True),
        ("0000", False),
        ("0001", False),
        ("0002", False),
    ]


def test_handler_may_skip_a_torn_shard_whole(daemon: Daemon, torn: str, tmp_path: Path) -> None:
    """Its samples are those of the other shards, none of them in half."""
    folder = make_files(tmp_path / "good", {"0009.cls": b"1", "0009.jpg": b"1"})
    good = run_tar(folder, tmp_path / "good.tar", "--sort=name", "-c", ".")
    dataset = ShardDataset(
        [torn, good], socket=daemon.socket, even=None, on_error=ignore_and_continue
    )
    assert [sample["__key__"] for sample in dataset] == ["./0009"]
