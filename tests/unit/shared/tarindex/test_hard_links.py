"""Hard links in a tar: members with an earlier file's content, as tarfile finds it."""

import os
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcache.errors import UnsupportedShardError
from shardcache.shared.tarindex.grouping import index_tar
from shardcache.shared.tarindex.members import Member, Tar
from shardcache.shared.tarindex.tables import Fault, fault_of
from support.shards.odd_tars import (
    archive,
    by_arrival,
    by_index,
    formats,
    header,
    member,
    records,
    sparse_tar,
)
from support.shards.tars import pack, special

URL = "s3://bucket/train-000000.tar"
LONG = "folder/" * 40


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shard.tar"


def found_in(path: Path) -> list[Member]:
    """Return the members of a tar, as the index walks them."""
    with open(path, "rb") as file:

        def read(at: int, min_bytes: int, max_bytes: int) -> bytes:
            return os.pread(file.fileno(), max_bytes, at)

        return list(Tar(read, path.stat().st_size, URL))


def contents(path: Path) -> list[tuple[str, bytes | None]]:
    """Return name and content of each member; None for one without."""
    data = path.read_bytes()
    return [
        (name.decode("utf-8", "surrogateescape"), None if fault else data[start:end])
        for name, start, end, fault in found_in(path)
    ]


def by_tarfile(path: Path) -> list[tuple[str, bytes | None]]:
    """Return name and content of each file and hard link; None if tarfile finds none."""
    found: list[tuple[str, bytes | None]] = []
    with tarfile.open(path) as tar:
        for info in tar.getmembers():
            if info.isreg() or info.islnk():
                try:
                    content = tar.extractfile(info)
                    found.append((info.name, None if content is None else content.read()))
                except KeyError:
                    found.append((info.name, None))
    return found


names = st.sampled_from(
    ["a.jpg", "b.jpg", "./a.jpg", "d/a.jpg", "d//a.jpg", LONG + "a.jpg", "none.jpg", "é.jpg"]
)
kinds = st.sampled_from([tarfile.REGTYPE, tarfile.LNKTYPE])
rows = st.lists(st.tuples(names, kinds, names, st.binary(max_size=600)), max_size=10)


@settings(deadline=None)
@given(rows=rows, format_=formats)
def test_links_lead_where_tarfile_follows_them(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[str, bytes, str, bytes]],
    format_: int,
) -> None:
    """Links lead to the path's last file before them, through links and long names."""
    if format_ == tarfile.USTAR_FORMAT:
        rows = [row for row in rows if LONG not in row[0] + row[2]]
    path = tmp_path_factory.getbasetemp() / "links.tar"
    path.write_bytes(
        pack([(special(name, kind, to), data) for name, kind, to, data in rows], format=format_)
    )
    assert contents(path) == by_tarfile(path)


@pytest.mark.parametrize("format_", ["gnu", "pax", "ustar"])
def test_links_of_gnu_tar_are_resolved(tmp_path: Path, path: Path, format_: str) -> None:
    """As it writes them, with names relative to the folder or below it."""
    folder = tmp_path / "data" / "deep"
    folder.mkdir(parents=True)
    (folder / "0.jpg").write_bytes(b"image")
    (folder / "1.jpg").hardlink_to(folder / "0.jpg")
    for base, name in ((folder, "."), (tmp_path, "data")):
        command = ["tar", f"--format={format_}", "--sort=name", "-C", base, "-cf", path, name]
        subprocess.run(command, check=True)
        assert [content for _, content in contents(path)] == [b"image", b"image"]


def test_link_to_nothing_is_a_fault_of_its_sample(path: Path) -> None:
    """The error names member and sample if the file is missing or later; others work."""
    lost = special("a.jpg", tarfile.LNKTYPE, "elsewhere.jpg")
    early = special("b.jpg", tarfile.LNKTYPE, "c.jpg")
    path.write_bytes(pack([(lost, b""), ("a.cls", b"0"), (early, b""), ("c.jpg", b"image")]))
    samples = index_tar(path, URL)
    assert sorted(samples.faults) == [0, 1]
    assert fault_of(samples, 0) == (
        "the member 'jpg' of the sample 'a' is a hard link "
        "to a file that is not in the tar before it"
    )


def test_link_to_a_sparse_file_is_sparse(path: Path) -> None:
    """Its content is no more in one piece than that of the file itself."""
    sparse = sparse_tar(path.parent, "PAX 1.0")
    path.write_bytes(
        sparse[:-1024] + header(b"z.bin", 0, b"1", fields={157: b"a.bin"}) + bytes(1024)
    )
    assert index_tar(path, URL).faults[2][0] is Fault.SPARSE


def test_link_that_gives_a_size_has_no_bytes_of_its_own(path: Path) -> None:
    """A size repeated in the link's header means no bytes, as in tarfile."""
    path.write_bytes(
        archive(member(b"a.jpg", b"image"), header(b"b.jpg", 5000, b"1", fields={157: b"a.jpg"}))
    )
    assert contents(path)[:2] == by_tarfile(path)[:2] == [("a.jpg", b"image"), ("b.jpg", b"image")]


def test_link_is_resolved_as_the_tar_arrives(path: Path) -> None:
    """The bytes that have arrived suffice, behind global records and extended headers."""
    parts = (
        records(("comment", "of no interest"), kind=b"g"),
        member(b"a.jpg", b"image" * 300),
        records(("path", "b.jpg"), ("linkpath", "./a.jpg")),
        header(b"x", 0, b"1"),
        member(b"b.cls", b"1"),
    )
    path.write_bytes(archive(*parts))
    whole = by_index(path)
    assert [dict(items).get("jpg") for items in whole.samples] == [
        b"image" * 300,
        b"image" * 300,
        None,
    ]
    assert by_arrival(path).samples == whole.samples[:-1]


def test_first_member_may_be_a_link(path: Path) -> None:
    """There is nothing before it that it could lead to."""
    path.write_bytes(archive(header(b"a.jpg", 0, b"1", fields={157: b"a.jpg"})))
    assert index_tar(path, URL).faults[0][0] is Fault.LINK


def test_lines_are_not_linked(path: Path) -> None:
    """A thousand links to one member of lines would multiply its samples and its time."""
    lines = member(b"__lines__/0.json", b"{}\n{}\n")
    path.write_bytes(
        archive(lines, header(b"__lines__/9.json", 0, b"1", fields={157: b"__lines__/0.json"}))
    )
    with pytest.raises(UnsupportedShardError, match="hard link") as caught:
        index_tar(path, URL)
    assert caught.value.url == URL


def test_sample_of_links_alone_is_whole(path: Path) -> None:
    """Its members lie before the sample, and it is read like any other."""
    link = [special(f"b.{name}", tarfile.LNKTYPE, f"a.{name}") for name in ("cls", "jpg")]
    path.write_bytes(pack([("a.cls", b"0"), ("a.jpg", b"image"), (link[0], b""), (link[1], b"")]))
    first, second = (dict(items) for items in by_index(path).samples)
    assert {**second, "__key__": "a"} == first
