"""globs.py: the same urls as by a plain translation, in a time that no pattern can blow up."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardcache.errors import ConfigError
from shardcache.origin.listing import glob_regex

PLAIN = {"*": "[^/]*", "**": ".*", "**/": "(?:.*/)?", "?": "[^/]", "[ab]": "[ab]", "[!a]": "[^/a]"}
patterns = st.lists(st.sampled_from([*PLAIN, "a", "b", "/", "/"]), max_size=9)


@settings(max_examples=500)
@given(patterns, st.text("aabb//c", max_size=10))
def test_a_glob_matches_what_its_plain_translation_matches(tokens: list[str], url: str) -> None:
    """Atomic groups make it fast, and lose no url: every way of putting stars together, against all short paths."""
    pattern = "".join(tokens)
    split = re.findall(r"\*\*/|\*\*|\*|\?|\[[^\]]*\]|.", pattern)
    plain = re.compile("".join(PLAIN.get(token, token) for token in split))
    try:
        found = glob_regex(pattern)
    except ConfigError:
        assume(False)
    assert bool(found.fullmatch(url)) == bool(plain.fullmatch(url)), pattern


@pytest.mark.parametrize("star", ["*", "**", "**/", "/**/"])
def test_many_stars_take_no_time(star: str) -> None:
    """A plain translation takes longer than anybody lives; the limit of the test run is what would notice."""
    try:
        regex = glob_regex("s3://bucket/" + f"{star}a" * 30 + "b")
    except ConfigError as exn:
        assert "too many" in exn.message
    else:
        for url in ("s3://bucket/" + "a" * 500, "s3://bucket/" + "a/" * 250):
            assert regex.fullmatch(url) is None


@pytest.mark.parametrize("part", ["*a", "[", "?*"])
def test_a_glob_longer_than_any_url_is_refused(part: str) -> None:
    """To take it apart would hold up everybody else for minutes."""
    with pytest.raises(ConfigError, match="more than 2048 characters"):
        glob_regex("s3://bucket/" + part * 50_000)
