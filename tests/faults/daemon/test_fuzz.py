"""Any bytes that come in give an answer or a typed error: kept, random and guided inputs."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from campaign import fuzz
from campaign.fuzzing.fuzz_targets import TARGETS, kept
from campaign.harness import Row, rows
from shardcache.access.deceptive import checked
from shardcache.access.urls import join, store_of
from shardcache.errors import ConfigError, ShardcacheError
from shardcache.origin.objects import RemoteObject
from shardcache.origin.patterns.braces import expand_braces
from shardcache.origin.patterns.globs import glob_regex
from shardcache.shared.lists import shardlist
from shardcache.store.folder.layout import JOURNAL, Layout
from shardcache.store.partial import Partial
from shardcache_client.position.state import find_states
from support.cases import examples

KEPT = [
    (name, path) for name in TARGETS for kind in ("corpus", "found") for path in kept(kind, name)
]
MAX_BYTES = 8192


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.just(10**4000)
)
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner)
)


@pytest.mark.parametrize(("name", "path"), KEPT, ids=[f"{name}-{path.name}" for name, path in KEPT])
def test_kept_inputs_break_nothing(name: str, path: Path) -> None:
    """Those to begin with, and those that broke something once."""
    TARGETS[name].check(path.read_bytes())


def by_chance(rng: random.Random) -> Callable[[bytes, int], bytes]:
    """Return a way to change bytes somewhere, as libFuzzer does where there is no libFuzzer."""

    def mutate(data: bytes, max_bytes: int) -> bytes:
        changed = bytearray(data or b"?")
        at = rng.randrange(len(changed))
        match rng.randrange(3):
            case 0:
                changed[at] = rng.randrange(256)
            case 1:
                del changed[at : at + rng.choice((1, 8, 512))]
            case _:
                changed[at:at] = changed[at : at + rng.choice((1, 8, 512))]
        return bytes(changed[:max_bytes])

    return mutate


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "session")) for name in TARGETS]
)
@pytest.mark.hypothesis  # the property is inside
def test_changed_inputs_break_nothing(name: str) -> None:
    """Without guidance by coverage, too: the kept inputs, changed by chance a few times."""
    target = TARGETS[name]
    seeds = [path.read_bytes() for kind, path in KEPT if kind == name]
    assert target.mutate is not None

    @examples(150)
    @given(data=st.sampled_from(seeds), seed=st.integers(0, 2**32))
    def check(data: bytes, seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(rng.randrange(1, 6)):
            data = target.mutate(data, MAX_BYTES, rng.getrandbits(32), by_chance(rng))
        target.check(data)

    check()


@rows(fuzz.ROWS)
def test_hostile_input_breaks_nothing(row: Row, tmp_path: Path) -> None:
    """The fuzzer really runs, and finds nothing."""
    row.check(tmp_path)


index_tokens = [
    "wids_version",
    "1",
    "{",
    "}",
    "[",
    "]",
    ":",
    ",",
    '"',
    "shardlist",
    "1e999",
    "\\ud800",
]
index_values = values | st.dictionaries(
    st.sampled_from(["wids_version", "shardlist", "datasets"]), values
)


@given(index_values.map(json.dumps) | st.lists(st.sampled_from(index_tokens)).map("".join))
@example("[" * 100_000)
@pytest.mark.slow
def test_any_text_is_an_index_or_a_value_error(text: str) -> None:
    """The rows of an index file have the right types, or it is refused with a reason."""
    try:
        rows = [row for some in shardlist.read(text.encode()) for row in zip(*some, strict=True)]
    except ValueError as exn:
        assert str(exn)
    else:
        assert all(isinstance(url, str) and (samples or 0) >= 0 for url, _, _, samples, _ in rows)


_PIECES = [
    "{",
    "}",
    "{0..3}",
    "{a,b}",
    "{1..",
    "..",
    ",",
    "*",
    "**/",
    "?",
    "[",
    "]",
    "[!a]",
    "/",
    "\\",
    "s3://b/",
    "x",
]
_PIECES += ["_OP_", "_CL_", "[0..2]", "\\{", "\\,"]
_PIECES += ["{" * 40, "{1..%s}" % ("9" * 5000), "\0", "\ud800", "é", "%2e%2e", "#", "@", ":"]


@given(st.lists(st.sampled_from(_PIECES), max_size=12).map("".join))
def test_any_pattern_is_urls_or_a_typed_error(pattern: str) -> None:
    """Braces, wildcards and urls that do not go together are refused; what they give is text."""
    for read in (
        lambda: checked(pattern),
        lambda: glob_regex(pattern),
        lambda: expand_braces("/" + pattern),
    ):
        try:
            read()
        except ShardcacheError as exn:
            assert exn.message
    assert isinstance(store_of(pattern), str)
    assert isinstance(join("s3://bucket/folder/index.json", pattern), str)


def test_a_checkpoint_that_holds_itself_is_refused() -> None:
    """Nested without end, as only something unpickled can be."""
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ConfigError, match="nested"):
        find_states(endless)


@given(
    journal=st.binary(max_size=200), title=st.booleans(), part=st.binary(min_size=300, max_size=300)
)
def test_any_journal_claims_only_what_is_there(
    tmp_path_factory: pytest.TempPathFactory, journal: bytes, title: bool, part: bytes
) -> None:
    """A part counts as done only if its bytes have the checksum that it was given."""
    layout = Layout(tmp_path_factory.mktemp("j"))
    layout.partial.mkdir()
    obj = RemoteObject("s3://bucket/a.tar", "v1", len(part))
    fresh = Partial.open(layout, obj, 64)
    fresh.path.write_bytes(part)
    first = fresh.journal_path.read_bytes() if title else b""
    fresh.journal_path.write_bytes(first + journal)
    opened = Partial.open(layout, obj, 64)
    assert opened.journal_path == layout.unpublished(opened.key, JOURNAL)
    assert set(opened.done) <= set(range(opened.part_count))
    if opened.done:
        assert opened.path.read_bytes() == part
