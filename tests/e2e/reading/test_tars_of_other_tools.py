"""Tars as people make them with other tools: linked files, members of macOS, samples in pieces; read by every door."""

import shutil
import subprocess
from pathlib import Path

import pytest

from shardcache_client import ShardDataset, ShardReader
from support.programs.daemon import Daemon

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
    assert [(sample["jpg"], sample["cls"]) for sample in samples] == [(b"one image", b"0"), (b"one image", b"1")]
    indexed = ShardDataset(url, socket=daemon.socket).indexed()
    assert indexed[1]["jpg"] == b"one image"


def test_members_of_macos_are_no_samples(daemon: Daemon, tmp_path: Path) -> None:
    """AppleDouble files between the members of a sample, as macOS packs them, leave it whole; so do its folders."""
    names = ["d/.DS_Store", "d/._0.cls", "d/0.cls", "d/._0.jpg", "d/0.jpg", "__MACOSX/d/._0.jpg", "__MACOSX/d/1.jpg"]
    folder = make_files(tmp_path / "files", dict.fromkeys(names, b"1"))
    url = run_tar(folder, tmp_path / "mac.tar", "-c", *names)
    samples = list(ShardReader(url, socket=daemon.socket))
    assert [set(sample) for sample in samples] == [{"__key__", "__url__", "cls", "jpg"}]
    assert samples[0]["__key__"] == "d/0"
