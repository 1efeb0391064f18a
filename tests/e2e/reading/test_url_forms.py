"""Forms of urls as users write them: prefixes, ranges, characters of patterns, queries."""

import asyncio
import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest

from shardcache.errors import ConfigError, NotFoundError
from shardcache.shared.formats.zstd_library import zstd_library
from shardcache_client.dataset import ShardDataset
from shardcache_client.files.paths import cached_paths, open_cached
from support.cases import first_quick
from support.programs.daemon import Daemon
from support.shards.reading import keys_of
from support.shards.tars import make_tar
from support.stores.faulty_s3 import FaultyS3

zstd = zstd_library()


def as_it_is(data: bytes) -> bytes:
    """Return the bytes of a tar that is not compressed."""
    return data


ARCHIVES: dict[str, Callable[[bytes], bytes]] = {
    "a.tar": as_it_is,
    "b.TAR": as_it_is,
    "c.tbz2": bz2.compress,
    "d.txz": lzma.compress,
    "f.tar.zstd": zstd.compress,
    "g.tar.GZ": gzip.compress,
    "h.tzst": zstd.compress,
    "i.tbz": bz2.compress,
    "j.tb2": bz2.compress,
    "k.tzstd": zstd.compress,
}


def write(folder: Path, *names: str) -> None:
    """Write a tar of one sample under each name; the sample's key is the name's stem."""
    folder.mkdir(exist_ok=True)
    for name in names:
        key = name.partition(".")[0].replace("[", "(")
        (folder / name).write_bytes(make_tar([{"__key__": key, "txt": b"text"}]))


def read(url: str | list[str], daemon: Daemon) -> list[str]:
    """Return the keys of all samples that a url stands for."""
    return keys_of(ShardDataset(url, socket=daemon.socket))


@pytest.fixture(scope="module")
def archives(folder: Path) -> Path:
    """A folder of one shard in each spelling of its suffix, and of other files."""
    place = folder / "archives"
    place.mkdir()
    for name, compress in ARCHIVES.items():
        tar = make_tar([{"__key__": name.partition(".")[0], "txt": b"text"}])
        (place / name).write_bytes(compress(tar))
    (place / "notes.txt").write_text("no shard")
    (place / "tar").write_text("nor is this")
    return place


@pytest.mark.slow
def test_a_prefix_has_shards_of_every_case_and_alias(archives: Path, daemon: Daemon) -> None:
    """The same names are shards below a prefix and in a list of urls."""
    keys = [name.partition(".")[0] for name in ARCHIVES]
    assert read(f"{archives}/", daemon) == keys
    assert read([f"{archives}/{name}" for name in ARCHIVES], daemon) == keys


def test_lz4_is_read_where_its_library_is_installed(tmp_path: Path, daemon: Daemon) -> None:
    """By a prefix, as any other compression."""
    frame = pytest.importorskip("lz4.frame")
    tar = make_tar([{"__key__": "a", "txt": b"text"}])
    (tmp_path / "a.tar.LZ4").write_bytes(frame.compress(tar))
    assert read(f"file://{tmp_path}/", daemon) == ["a"]


def test_cached_paths_inflate_shards_of_every_case_and_alias(
    archives: Path, daemon: Daemon
) -> None:
    """A prefix stands for the shards below it, which arrive as plain tars."""
    with cached_paths(f"{archives}/", socket=daemon.socket) as paths:
        sizes = {Path(path).stat().st_size for path in paths}
    assert len(paths) == len(ARCHIVES)
    assert sizes == {(archives / "a.tar").stat().st_size}


def test_files_left_out_of_a_prefix_are_logged_with_their_number(
    archives: Path, daemon: Daemon
) -> None:
    """The daemon's log has one line for a listing, with the first of them."""
    read(f"{archives}/", daemon)
    line = next(line for line in daemon.log.read_text().splitlines() if "left out" in line)
    assert "files=2" in line
    assert "notes.txt" in line


@pytest.fixture(scope="module")
def audio(folder: Path) -> Path:
    """A folder of five numbered shards."""
    place = folder / "audio"
    write(place, *(f"audio_{number}.tar" for number in range(5)))
    return place


@pytest.mark.parametrize(
    "pattern", ["audio_[0..2].tar", "audio__OP_0..2_CL_.tar", "audio__OP_0,1,2_CL_.tar"]
)
def test_ranges_in_nemos_spelling_are_ranges(pattern: str, audio: Path, daemon: Daemon) -> None:
    """A glob's class would match `0`, `.` and `2`, and leave out a shard silently."""
    assert read(f"{audio}/{pattern}", daemon) == ["audio_0", "audio_1", "audio_2"]


def test_a_class_of_characters_is_still_a_glob(audio: Path, daemon: Daemon) -> None:
    """So is one with a single dot."""
    assert read(f"{audio}/audio_[02.].tar", daemon) == ["audio_0", "audio_2"]


@pytest.fixture(scope="module")
def odd(folder: Path) -> Path:
    """A folder of shards with the characters of patterns in their names."""
    place = folder / "odd"
    write(place, "br[1].tar", "br1.tar", "cr1.tar", "br{1}.tar", "br{0,1}.tar")
    return place


def test_a_url_that_exists_literally_is_that_url(odd: Path, daemon: Daemon) -> None:
    """Although as a glob it matches another shard, which it is where there is no such object."""
    assert read(f"{odd}/br[1].tar", daemon) == ["br(1]"]
    assert read(f"{odd}/cr[1].tar", daemon) == ["cr1"]


def test_a_literal_url_is_evicted_by_its_name(odd: Path, daemon: Daemon) -> None:
    """The commands take the same forms."""
    url = f"{odd}/br[1].tar"
    read(url, daemon)
    daemon.await_publication()
    assert url in {shard["url"] for shard in daemon.shards()}
    daemon.evict(url)
    assert url not in {shard["url"] for shard in daemon.shards()}


def test_escaped_braces_are_part_of_the_name(odd: Path, daemon: Daemon) -> None:
    """As in a shell; a comma is escaped within them."""
    assert read(rf"{odd}/br\{{1\}}.tar", daemon) == ["br{1}"]
    assert read(rf"{odd}/br{{\{{1\}},\{{0\,1\}}}}.tar", daemon) == ["br{1}", "br{0,1}"]


def test_the_error_of_braces_says_how_to_escape_them(odd: Path, daemon: Daemon) -> None:
    """Of braces that expand to nothing."""
    with pytest.raises(ConfigError, match="the braces do not expand") as caught:
        read(f"{odd}/none{{1}}.tar", daemon)
    assert r"\{ or \}" in caught.value.remedy


def test_the_error_of_a_glob_says_how_to_escape_it(odd: Path, daemon: Daemon) -> None:
    """Of a glob that matches nothing; the spelling that it names works."""
    with pytest.raises(NotFoundError) as caught:
        read(f"{odd}/none[1].tar", daemon)
    assert "`[[]`" in caught.value.remedy
    assert read(f"{odd}/br[[]1].tar", daemon) == ["br(1]"]


async def test_an_index_with_a_query_is_an_index(faulty: FaultyS3, daemon: Daemon) -> None:
    """As the Hub's links to files have; its relative urls have none."""
    rows = [{"url": f"{name}.tar", "nsamples": 1} for name in "ab"]
    faulty.put("index.json", json.dumps({"wids_version": 1, "shardlist": rows}).encode())
    for name in "ab":
        faulty.put(f"{name}.tar", make_tar([{"__key__": name, "txt": b"text"}]))
    keys = await asyncio.to_thread(read, f"{faulty.http_url('index.json')}?download=true", daemon)
    assert keys == ["a", "b"]


@pytest.mark.parametrize(
    "name", first_quick(["a_[0..2].tar", "a{1,2}.tar", "a{.tar", "a_OP_0..2_CL_.tar", "b::c.tar"])
)
def test_path_that_exists_is_that_file(tmp_path: Path, daemon: Daemon, name: str) -> None:
    """Whatever a pattern would make of it, and for each way to read it."""
    write(tmp_path / "d", name)
    url = str(tmp_path / "d" / name)
    key = name.partition(".")[0].replace("[", "(")
    assert read(url, daemon) == [key]
    with open_cached(url, socket=daemon.socket) as file:
        assert file.read() == Path(url).read_bytes()
    with cached_paths(url, socket=daemon.socket) as paths:
        assert len(paths) == 1


@pytest.mark.parametrize("pattern", ["", "*.tar"])
def test_name_that_is_no_url_is_left_out_alone(
    tmp_path: Path, daemon: Daemon, pattern: str
) -> None:
    """A line break in one name does not refuse a whole prefix or glob; the daemon logs it."""
    write(tmp_path / "d", "a.tar", "b\nc.tar")
    assert read(f"{tmp_path}/d/{pattern}", daemon) == ["a"]
    assert "keys below the prefix that are not valid urls" in daemon.log.read_text()
