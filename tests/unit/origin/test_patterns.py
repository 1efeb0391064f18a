"""Expansion of braces and globs, without a request."""

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardcache.access.urls import glob_prefix
from shardcache.errors import ConfigError
from shardcache.origin.patterns.braces import expand_braces
from shardcache.origin.patterns.globs import glob_regex
from support.cases import examples

PLAIN = {"*": "[^/]*", "**": ".*", "**/": "(?:.*/)?", "?": "[^/]", "[ab]": "[ab]", "[!a]": "[^/a]"}
patterns = st.lists(st.sampled_from([*PLAIN, "a", "b", "/", "/"]), max_size=9)


@given(st.integers(0, 99), st.integers(0, 99), st.integers(2, 5))
def test_a_numeric_range_counts_with_its_zeros(first: int, last: int, width: int) -> None:
    """Every number from the first to the last, padded as written, in that direction."""
    urls = expand_braces(f"s3://b/x-{{{first:0{width}}..{last:0{width}}}}.tar")
    step = 1 if first <= last else -1
    assert urls == [f"s3://b/x-{number:0{width}}.tar" for number in range(first, last + step, step)]


def test_alternatives_and_ranges_multiply() -> None:
    """Several braces give every combination, and nested ones as many as in a shell."""
    names = ("train-0", "train-1", "val-0", "val-1")
    assert expand_braces("s3://b/{train,val}-{0..1}.tar") == [
        f"s3://b/{name}.tar" for name in names
    ]
    nested = {
        "s3://b/{x,y{1,2}}-{0..9}.tar": 30,
        "s3://b/{a{0..9},b}.tar": 11,
        "s3://b/a,b{0..9}": 10,
    }
    assert {pattern: len(expand_braces(pattern)) for pattern in nested} == nested


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        "s3://b/{000..",
        "s3://b/{}.tar",
        "s3://b/{x}.tar",
        "s3://b/0}.tar",  # would be asked for literally
        "s3://b/{000000000..999999999}.tar",  # these would take minutes to expand
        "s3://b/" + "{a,b}" * 30,
        "s3://b/" + "{" * 40 + "a,b" + "}" * 40,
        "s3://b/{1..%s}" % ("9" * 5000),
    ],
)
def test_braces_that_expand_to_nothing_or_too_much_are_an_error(pattern: str) -> None:
    """At once: alternatives multiply as ranges do, and nobody nests forty deep."""
    with pytest.raises(ConfigError):
        expand_braces(pattern)


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        (
            "s3://b/*.tar",
            ["s3://b/a.tar", "s3://b/.tar"],
            ["s3://b/x/a.tar", "s3://b/a.tarx", "s3://bb/a.tar"],
        ),
        ("s3://b/**/a.tar", ["s3://b/a.tar", "s3://b/x/y/a.tar"], ["s3://b/xa.tar"]),
        ("s3://b/**", ["s3://b/a", "s3://b/x/y"], ["s3://c/a"]),
        (
            "s3://b/?[ab][!c].tar",
            ["s3://b/xad.tar"],
            ["s3://b/xac.tar", "s3://b/xcd.tar", "s3://b//ad.tar"],
        ),
        ("s3://b/a[!x]c", ["s3://b/abc"], ["s3://b/a/c"]),
        ("s3://b/[0-4-].tar", ["s3://b/3.tar", "s3://b/-.tar"], ["s3://b/5.tar"]),
        ("s3://b/a[+-9]c", ["s3://b/a5c"], ["s3://b/a/c"]),
        ("s3://b/a+(1).tar*", ["s3://b/a+(1).tar.gz"], ["s3://b/aa1.tar"]),
    ],
)
def test_globs_match_as_in_a_shell(pattern: str, yes: list[str], no: list[str]) -> None:
    """Wildcards stay within a folder, `**` crosses folders, everything else is literal."""
    assert [url for url in yes + no if glob_regex(pattern).fullmatch(url)] == yes


@given(st.text("ab*?[]/", max_size=8), st.text("ab/", max_size=8))
def test_every_match_begins_with_the_prefix(pattern: str, url: str) -> None:
    """The listing for a glob contains all that it matches."""
    if glob_regex(pattern).fullmatch(url):
        assert url.startswith(glob_prefix(pattern))


@examples(200)
@given(patterns, st.text("aabb//c", max_size=10))
def test_a_glob_matches_what_its_plain_translation_matches(tokens: list[str], url: str) -> None:
    """Atomic groups make it fast and lose no url, with stars against all short paths."""
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
    """A plain translation takes longer than a life; the test run's limit would notice."""
    try:
        regex = glob_regex("s3://bucket/" + f"{star}a" * 30 + "b")
    except ConfigError as exn:
        assert "too many" in exn.message
    else:
        for url in ("s3://bucket/" + "a" * 500, "s3://bucket/" + "a/" * 250):
            assert regex.fullmatch(url) is None


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        *((f"s3://bucket/{part * 50_000}", "more than 2048 characters") for part in ("*a", "[")),
        # Bash and regular expressions disagree on its meaning.
        ("s3://b/[9-0].tar", "invalid glob"),
    ],
)
def test_a_glob_longer_than_any_url_is_refused(pattern: str, reason: str) -> None:
    """Taking it apart would take minutes; a glob that can match nothing is refused, too."""
    with pytest.raises(ConfigError, match=reason):
        glob_regex(pattern)
