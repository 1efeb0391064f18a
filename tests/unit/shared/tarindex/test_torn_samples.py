"""Samples whose members are not adjacent, against a plain reckoning of their keys."""

from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcache.errors import TornSampleError
from shardcache.shared.tarindex.grouping import index_tar
from support.shards.odd_tars import by_arrival, by_index
from support.shards.tars import pack

URL = "s3://bucket/train-000000.tar"

rows = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from(["x", "y", "z"])), max_size=12, unique=False
)


def torn_member(rows: list[tuple[str, str]]) -> int | None:
    """Return the number of the first member of a part of a sample."""
    firsts: dict[str, set[str]] = {}
    number = 0
    for key, group in groupby(rows, key=lambda row: row[0]):
        extensions = [extension for _, extension in group]
        if firsts.setdefault(key, set(extensions)) != set(extensions):
            return number
        number += len(extensions)
    return None


@settings(deadline=None)
@given(rows=rows)
def test_torn_samples_are_those_whose_key_comes_again_with_other_members(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]]
) -> None:
    """Any number of samples may be around them; the first is named with its byte."""
    path = tmp_path_factory.getbasetemp() / "torn.tar"
    path.write_bytes(pack([(f"{key}.{extension}", b"1") for key, extension in rows]))
    number = torn_member(rows)
    error = by_index(path).error
    assert isinstance(error, TornSampleError) == (number is not None)
    if number is not None:
        assert f"the member {rows[number][1]!r} at byte {1024 * number + 512}:" in str(error)


def test_beginning_of_an_arriving_shard_is_given_up_at_the_second_part(tmp_path: Path) -> None:
    """The first parts are not known to be any; what comes behind the second is not given."""
    names = [f"{number}.jpg" for number in range(5)] + [f"{number}.cls" for number in range(5)]
    (tmp_path / "a.tar").write_bytes(pack([(name, b"1") for name in names]))
    found = by_arrival(tmp_path / "a.tar")
    assert found.keys == ["0", "1", "2", "3", "4"]
    assert isinstance(found.error, TornSampleError)


def test_lines_with_one_number_in_two_members_are_torn(tmp_path: Path) -> None:
    """Columns of lines would be samples of one member each."""
    path = tmp_path / "a.tar"
    path.write_bytes(pack([("__lines__/0.json", b"{}\n{}\n"), ("__lines__/0.txt", b"a\nb\n")]))
    with pytest.raises(TornSampleError, match="the key '0' appears again, with the member 'txt'"):
        index_tar(path, URL)
