"""The parts of listing that ask nobody: braces and index files."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache.errors import ConfigError, OriginError
from shardcache.origin.listing import expand_braces, parse_index
from shardcache.protocol import ShardRef


@given(st.integers(0, 99), st.integers(0, 99), st.integers(2, 5))
def test_a_numeric_range_counts_with_its_zeros(first: int, last: int, width: int) -> None:
    """Every number from the first to the last, padded as written, in that direction."""
    urls = expand_braces(f"s3://b/x-{{{first:0{width}}..{last:0{width}}}}.tar")
    step = 1 if first <= last else -1
    assert urls == [f"s3://b/x-{number:0{width}}.tar" for number in range(first, last + step, step)]


def test_alternatives_and_ranges_multiply() -> None:
    """Several braces give every combination, the last running fastest."""
    assert expand_braces("s3://b/{train,val}-{0..1}.tar") == [
        "s3://b/train-0.tar",
        "s3://b/train-1.tar",
        "s3://b/val-0.tar",
        "s3://b/val-1.tar",
    ]


@pytest.mark.parametrize("pattern", ["s3://b/{000..", "s3://b/{}.tar", "s3://b/{x}.tar", "s3://b/0}.tar", ""])
def test_braces_that_expand_to_nothing_are_an_error(pattern: str) -> None:
    """A pattern left with braces would be asked for literally, and found missing much later."""
    with pytest.raises(ConfigError):
        expand_braces(pattern)


def test_a_range_beyond_reason_is_refused_before_it_is_expanded() -> None:
    """A slip of the keyboard must not fill the daemon's memory."""
    with pytest.raises(ConfigError, match="too many shards"):
        expand_braces("s3://b/{000000000..999999999}.tar")


@pytest.mark.parametrize(
    "pattern", ["s3://b/" + "{a,b}" * 30, "s3://b/" + "{" * 40 + "a,b" + "}" * 40, "s3://b/{1..%s}" % ("9" * 5000)]
)
def test_what_would_take_minutes_to_expand_is_refused_at_once(pattern: str) -> None:
    """Alternatives multiply as ranges do, and nobody nests forty deep."""
    with pytest.raises(ConfigError):
        expand_braces(pattern)


@pytest.mark.parametrize(
    ("pattern", "count"),
    [("s3://b/{x,y{1,2}}-{0..9}.tar", 30), ("s3://b/{a{0..9},b}.tar", 11), ("s3://b/a,b{0..9}", 10)],
)
def test_nested_braces_are_as_many_as_in_a_shell(pattern: str, count: int) -> None:
    """Guessing how many there will be refuses no honest pattern."""
    assert len(expand_braces(pattern)) == count


def test_an_index_gives_urls_counts_and_sizes() -> None:
    """The wids format's fields arrive in the manifest, urls resolved against the index."""
    rows = [{"url": "a.tar", "nsamples": 10, "filesize": 2048}, {"url": "s3://c/b.tar"}]
    data = json.dumps({"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": rows}).encode()
    assert parse_index("s3://b/train/index.json", data) == [
        ShardRef("s3://b/train/a.tar", None, 2048, 10),
        ShardRef("s3://c/b.tar"),
    ]


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"shardlist": [1]}', b'{"shardlist": 3}', b"\xff", b"null"])
def test_what_is_no_index_is_an_error_with_a_remedy(data: bytes) -> None:
    """Any other JSON, or none, says what an index looks like."""
    with pytest.raises(OriginError) as refused:
        parse_index("s3://b/index.json", data)
    assert "shardlist" in refused.value.remedy
