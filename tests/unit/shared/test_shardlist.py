"""Index files in wids format, written and read."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache.access.deceptive import checked
from shardcache.errors import ConfigError, OriginError
from shardcache.origin.patterns.index_files import parse_index
from shardcache.shared.lists import shardlist
from shardcache.shared.protocol import ShardRef

ETAG = "0123456789abcdef0123456789abcdef-12"


def _is_fetched(name: str) -> bool:
    try:
        checked(f"s3://b/train/{name}")
    except ConfigError:
        return False
    return True


names = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1).filter(
    _is_fetched
)
shards = st.lists(
    st.builds(
        ShardRef,
        names.map(lambda name: f"s3://b/train/{name}"),
        st.text("0123456789abcdef-", min_size=1),
        st.integers(0, 2**63 - 1),
        st.integers(0, 2**63 - 1),
        st.none() | st.integers(0, 2**63 - 1),
        st.just(False),
    )
)


@given(shards, st.sampled_from([None, "s3://b/train", "s3://b/train/", "s3://b/", "s3://other/"]))
def test_index_file_is_read_back_as_written(
    written: list[ShardRef], relative_to: str | None
) -> None:
    """Whatever the keys look like, the index gives the same shards where it was said to lie."""
    text = shardlist.write(written, relative_to)
    place = (relative_to or "s3://anywhere/at/all").rstrip("/") + "/index.json"
    assert list(parse_index(place, text.encode())) == written


def test_index_has_the_fields_that_wids_reads() -> None:
    """`wids.ShardListDataset` (webdataset 0.2.111) finds its fields under its names."""
    index = json.loads(shardlist.write([ShardRef("s3://b/train/a.tar", ETAG, 2048, 10)]))
    assert index["wids_version"] == 1
    assert index["shardlist"] == [
        {"url": "s3://b/train/a.tar", "nsamples": 10, "filesize": 2048, "etag": ETAG}
    ]


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("s3://b/train/a.tar", "a.tar"),
        ("s3://b/train/sub/a.tar", "sub/a.tar"),
        ("s3://b/training.tar", "s3://b/training.tar"),
        ("s3://c/train/a.tar", "s3://c/train/a.tar"),
        ("s3://b/train//a.tar", "s3://b/train//a.tar"),
    ],
)
def test_shards_below_the_index_are_named_relative_to_it(url: str, named: str) -> None:
    """Only that, and nothing that a reader would resolve to another key."""
    index = json.loads(shardlist.write([ShardRef(url, "v", 1, 1)], "s3://b/train/"))
    assert index["shardlist"][0]["url"] == named


@pytest.mark.parametrize(
    ("url", "written", "version"),
    [
        ("s3://b/a.tar", '"abc"', "abc"),
        ("s3://b/a.tar", "abc", "abc"),
        ("s3://b/a.tar", '""', None),
        ("http://h/a.tar", '"abc"', '"abc"'),
        ("https://h/a.tar", 'W/"abc"', 'W/"abc"'),
    ],
)
def test_an_etag_is_compared_as_its_store_gives_it(
    url: str, written: str, version: str | None
) -> None:
    """With or without quotes in the file, it is in the form of that origin's versions."""
    index = json.dumps({"shardlist": [{"url": url, "etag": written}]})
    assert list(parse_index("s3://b/index.json", index.encode())) == [ShardRef(url, version)]


VALUES = {
    "nsamples": ["10", 10.0, True, -1],
    "filesize": ["1 GB"],
    "ntokens": [1.5],
    "etag": [7],
    "url": [None],
}
INDEX = {"wids_version": 1, "shardlist": [{"url": "a.tar"}]}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        *((data, "not an index") for data in (b"", b"[]", b"{}", b"\xff", b"null")),
        *((b'{"shardlist": %b}' % shards, "not an index") for shards in (b"[1]", b"3")),
        (
            json.dumps(INDEX | {"datasets": [{"source_url": "s3://b/more.json"}]}).encode(),
            "further datasets",
        ),
        (json.dumps(INDEX | {"wids_version": 2}).encode(), "wids_version 2"),
        (b'{"shardlist": [{"url": "a.tar"}], "shardlist": [{"url": "b.tar"}]}', "more than one"),
        *(
            (
                json.dumps(
                    {"shardlist": [{"url": "a.tar", "nsamples": 10} | {name: value}]}
                ).encode(),
                name,
            )
            for name, values in VALUES.items()
            for value in values
        ),
    ],
)
def test_file_that_is_not_an_index_is_an_error_with_a_remedy(data: bytes, reason: str) -> None:
    """The error says what an index looks like, instead of losing data in silence.

    A count that is guessed at would train on another dataset: the error names the field.
    """
    with pytest.raises(OriginError, match=reason) as refused:
        parse_index("s3://b/index.json", data)
    assert refused.value.url == "s3://b/index.json"
    assert "shardcache index" in refused.value.remedy
    assert "shardlist" in refused.value.remedy
