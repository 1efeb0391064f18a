"""Names of members, split at their last dot."""

import pytest

from shardcache.shared.tarindex.grouping import split_at_last_dot, split_name, splitter_of
from shardcache.shared.tarindex.key_splits import key_split_in, with_key_split


@pytest.mark.parametrize(
    ("name", "key", "extension"),
    [
        (b"a.wav", b"a", b"wav"),
        (b"a.b.c.wav", b"a.b.c", b"wav"),
        (b"x.y/a.b.wav", b"x.y/a.b", b"wav"),
        (b"a.", b"a", b""),
        (b"x.y/a", b"", b""),
        (b".hidden", b"", b""),
        (b"x/.hidden", b"", b""),
        (b"._a.b.wav", b"", b""),
        (b"__MACOSX/a.b.wav", b"", b""),
    ],
)
def test_names_are_split_at_their_last_dot(name: bytes, key: bytes, extension: bytes) -> None:
    """Dots of folders do not count, and what macOS adds is left out."""
    assert split_at_last_dot(name) == (key, extension)


def test_url_says_where_names_are_split() -> None:
    """One that says nothing means the first dot, as in WebDataset."""
    url = with_key_split("s3://b/a.tar?versionId=1", "last-dot")
    assert url == with_key_split(url, "last-dot") == "s3://b/a.tar?versionId=1#key_split=last-dot"
    assert key_split_in(url) == ("s3://b/a.tar?versionId=1", "last-dot")
    assert splitter_of(url) is split_at_last_dot
    assert splitter_of(with_key_split("s3://b/a.tar", "first-dot")) is split_name
