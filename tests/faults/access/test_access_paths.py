"""No path leaves the cache folder, and no text leaves its line, whatever urls, versions, members and names contain."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache.store.folder import JOURNAL, PART, SIDECAR, TAR, Layout, is_key, shard_key
from shardcache_client import ShardDataset
from support.programs.cli import shardcache
from support.programs.daemon import Daemon
from support.programs.guard import GUARD_S
from support.programs.raw_session import RawSession
from support.shards.tars import make_tar, random_samples
from support.stores.canary import Canary

PIECES = ("../", "/", "\\", "\0", ".", "%2f", "a", "é", "\n", "~", "$(x)", ".tar", "-")
NASTY = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
ROOT = Layout(Path("/cache"))


@given(st.one_of(NASTY, st.text()), st.one_of(NASTY, st.text()))
def test_every_name_in_the_cache_is_made_of_hex_digits(url: str, version: str) -> None:
    """Urls and ETags have no influence on a shard's path but by their hash."""
    key = shard_key(url.encode(errors="replace").decode(), version.encode(errors="replace").decode())
    assert is_key(key)
    paths = [ROOT.tar(key), ROOT.sidecar(key), *(ROOT.in_progress(key, end) for end in (PART, JOURNAL, TAR, SIDECAR))]
    assert all(path.parts[:2] == ("/", "cache") and ".." not in path.parts for path in paths)


@given(NASTY, NASTY, NASTY, NASTY)
def test_no_two_shards_share_a_name(url: str, version: str, other_url: str, other_version: str) -> None:
    """Not even where one's url ends as the other's version begins."""
    if (url, version) != (other_url, other_version) and "\0" not in url + other_url:
        assert shard_key(url, version) != shard_key(other_url, other_version)


def hostile_tar(outside: Path) -> bytes:
    """Return a tar that would write all over the place, were it unpacked."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in (f"{outside}/absolute.bin", "../../../climb.bin", "a/../../b.bin", "c\x1b[2J.bin", "d\n.bin"):
            member = tarfile.TarInfo(name)
            member.size = 4
            tar.addfile(member, io.BytesIO(b"data"))
        link = tarfile.TarInfo("link.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
        device = tarfile.TarInfo("device.bin")
        device.type = tarfile.CHRTYPE
        tar.addfile(device)
    return buffer.getvalue()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon in a folder of its own."""
    folder = tmp_path / "d"
    folder.mkdir()
    with Daemon(folder, "--attempts", "2") as running:
        yield running


def test_members_of_a_tar_are_data(tmp_path: Path, daemon: Daemon) -> None:
    """Absolute and climbing names are samples' keys, links and devices are no samples, and nothing is unpacked."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "shard.tar").write_bytes(hostile_tar(outside))
    before = set(_outside(daemon, tmp_path))
    samples = list(ShardDataset(str(tmp_path / "shard.tar"), socket=daemon.socket, timeout_s=GUARD_S))
    assert [sample["bin"] for sample in samples] == [b"data"] * 5
    assert set(_outside(daemon, tmp_path)) == before
    inside = [path for path in daemon.cache_dir.rglob("*") if path.is_symlink() or "climb" in path.name]
    assert inside == []


def _outside(daemon: Daemon, folder: Path) -> Iterator[Path]:
    """Yield what lies in `folder`, the daemon's own files left out: they come and go while one looks."""
    own = daemon.cache_dir.parent
    return (path for path in folder.rglob("*") if path != own and own not in path.parents)


@pytest.mark.parametrize(
    "name", ['"../../../etag"', '"a\\b"', '"\x1b[2J"', '"\xff\x9b"', 'W/"weak"', '"' + "x" * 5000 + '"']
)
def test_a_version_is_a_name_and_nothing_else(name: str, daemon: Daemon) -> None:
    """An ETag may be anything: what comes of it is a shard of such a version, or of none where it cannot be written."""
    with Canary() as server:
        server.etag = name
        server.files["/a.tar"] = make_tar(random_samples(2))
        assert len(list(ShardDataset(server.url("/a.tar"), socket=daemon.socket, timeout_s=GUARD_S))) == 2
    (shard,) = daemon.shards()
    assert shard["version"] == (f"size={shard['size_bytes']}" if "\x1b" in name else name)
    assert all(path.stem.isalnum() for path in (daemon.cache_dir / "shards").rglob("*.tar"))


def test_the_command_line_shows_names_and_obeys_none(tmp_path: Path, daemon: Daemon) -> None:
    """Neither rich's markup in a url, nor a terminal's commands in a job's name or in what a server says."""
    (tmp_path / "[red]a[link=x].tar").write_bytes(make_tar(random_samples(2)))
    daemon.request("POST", "/v1/warm", {"urls": [f"{tmp_path}/*.tar"]})
    with RawSession(daemon, job="\x1b]0;owned\x07\x1b[2J\u202e[red]job"):
        shown = shardcache("status", socket=daemon.socket).out + shardcache("ls", socket=daemon.socket).out
    assert "[red]a[link=x].tar" in shown and "[red]job" in shown
    assert "\x1b" not in shown and "\x07" not in shown and "\u202e" not in shown
    with Canary() as server:
        server.words = b"gone\x1b[2J \x9b2J\r\n"
        ran = shardcache("warm", server.url("/a.tar"), socket=daemon.socket)
    assert ran.code == 1 and "gone" in ran.out + ran.err
    assert "\x1b" not in ran.out + ran.err and "\x9b" not in ran.out + ran.err
