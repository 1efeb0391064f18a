"""manifest.py: the samples that a selection chooses, combinations, plans in pieces."""

import pickle
from array import array
from dataclasses import replace
from itertools import accumulate, chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache.errors import ConfigError
from shardcache.shared.protocol import ShardRef
from shardcache.shared.tarindex.contents import entries_of, rows_of
from shardcache.shared.tarindex.tables import Samples
from shardcache_client.order.dealing.deal_options import DealOptions
from shardcache_client.order.shards.choices import By, Choices, split, subset
from shardcache_client.order.shards.declared_plan import Plan
from shardcache_client.order.shards.manifest import JoinedManifest, Manifest
from shardcache_client.parts.sample_tables import select
from support.cases import examples

COUNTS = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any)
FRACTIONS = st.lists(st.integers(1, 20), min_size=1, max_size=5).map(
    lambda each: [one / sum(each) for one in each]
)


def manifest(counts: list[int]) -> Manifest:
    """Return a manifest of shards with so many samples."""
    return Manifest.of(
        ShardRef(f"s3://a/{number}.tar", "v", 1, count) for number, count in enumerate(counts)
    )


def numbers(counts: list[int], choices: Choices) -> list[int]:
    """Return the numbers in the dataset of the samples chosen."""
    chosen = manifest(counts).select(choices)
    firsts = [0, *accumulate(counts)]
    found: list[int] = []
    for shard, count in enumerate(counts):
        own = chosen.chosen(shard)
        found += [firsts[shard] + number for number in (range(count) if own is None else own)]
    return found


@given(COUNTS, FRACTIONS, st.integers(0, 5), st.sampled_from(["samples", "shards"]))
def test_a_split_has_every_sample_once(
    counts: list[int], fractions: list[float], seed: int, by: By
) -> None:
    """Sizes are right to a sample, or to a shard if shards stay whole."""
    try:
        parts = split(counts, fractions, seed, by)
    except ConfigError as exn:
        assert "is empty" in exn.message
        return
    assert [sorted(numbers(counts, part)) for part in parts] == [
        numbers(counts, part) for part in parts
    ]
    assert sorted(chain.from_iterable(numbers(counts, part) for part in parts)) == list(
        range(sum(counts))
    )
    error = 1 if by == "samples" else 1 + 2 * max(counts)
    error += 1e-9  # of the fractions' own sums
    for fraction, choices in zip(fractions, parts, strict=True):
        chosen = manifest(counts).select(choices)
        assert chosen.samples == len(numbers(counts, choices))
        assert abs(chosen.samples - fraction * sum(counts)) <= error
        for count, size in zip(counts, chosen.counts or (), strict=True):
            if by == "shards":
                assert size in (0, count)
            else:
                assert abs(size - fraction * count) < 5
    assert split(counts, fractions, seed, by) == parts


def test_a_split_is_pinned() -> None:
    """A validation sample stays one: with another release, too, and whatever numpy there is."""
    counts = [10, 0, 7]
    parts = [numbers(counts, part) for part in split(counts, (0.6, 0.3, 0.1), 1, "samples")]
    assert parts == [[2, 4, 5, 6, 8, 9, 13, 14, 15, 16], [0, 1, 3, 11, 12], [7, 10]]
    assert [numbers([1] * 8, part) for part in split([1] * 8, (0.75, 0.25), 1, "shards")] == [
        [0, 1, 2, 3, 4, 7],
        [5, 6],
    ]


@pytest.mark.parametrize(
    "fractions", [(), (0.5,), (0.5, 0.6), (1.5, -0.5), (1.0, 0.0), (float("nan"), 1.0)]
)
def test_fractions_that_do_not_divide_are_refused(fractions: tuple[float, ...]) -> None:
    """So is a part that would be empty."""
    with pytest.raises(ConfigError, match="split into the fractions"):
        split([10], fractions, 0, "samples")
    with pytest.raises(
        ConfigError, match=r"part 1 of the split, 0\.01 of 10 samples in 2 shards, is empty"
    ):
        split([5, 5], (0.99, 0.01), 0, "samples")


@given(COUNTS, st.data())
def test_choices_within_choices(counts: list[int], data: st.DataObject) -> None:
    """The second counts the samples of the first; whatever the kinds."""
    total = sum(counts)
    outer = subset(counts, data.draw(st.sets(st.integers(-total, total - 1), min_size=1)))
    chosen = numbers(counts, outer)
    within = manifest(counts).select(outer)
    assert within.counts is not None
    assert sum(within.counts) == len(chosen)
    inner = subset(within.counts, data.draw(st.sets(st.integers(0, len(chosen) - 1))))
    for choices in (inner, *split(within.counts, (1.0,), 0, "samples")):
        both = pickle.loads(pickle.dumps(within.select(choices)))
        assert both.choices is not None
        places = numbers(within.counts, choices)
        assert numbers(counts, both.choices) == [chosen[place] for place in places]
        assert both.samples == len(places)


def test_other_samples_are_another_dataset() -> None:
    """States fit no other selection of the same size, nor the whole."""
    whole = manifest([4, 4])
    first = whole.select(subset([4, 4], [0, 5]))
    second = whole.select(subset([4, 4], [1, 5]))
    assert first.counts == second.counts == [1, 1]
    identities = [DealOptions().identities(each) for each in (whole, first, second)]
    assert len({names[True] for names in identities}) == 3
    # A selection never deals whole shards.
    assert [False in names for names in identities] == [True, False, False]
    assert first.fingerprint == whole.fingerprint
    joined = Manifest.concatenated([first, whole, second])
    assert joined.counts == [1, 1, 4, 4, 1, 1]
    assert [joined.chosen(shard) for shard in range(6)] == [[0], [1], None, None, [1], [1]]
    assert Manifest.concatenated([whole, whole]).choices is None


def tables(count: int) -> Samples:
    """Return the tables of samples of which every other one has a caption."""
    samples = Samples(extensions=["jpg", "txt"])
    for number in range(count):
        samples.begin(b"%d" % number)
        samples.starts += array("Q", [100, 200] if number % 2 else [100])
        samples.ends += array("Q", [100 + number, 207] if number % 2 else [100 + number])
        samples.extension_ids += array("I", [0, 1] if number % 2 else [0])
    samples.end()
    return samples


@pytest.mark.parametrize("count", [0, 1, 9, 10, 11, 35])
def test_rows_have_keys_and_sizes(count: int) -> None:
    """In pieces of bounded size; a shard without samples has a row, so that it is not missing."""
    rows = list(rows_of(tables(count), max_samples=10))
    assert len(rows) == max(1, -(-count // 10))
    entries = [entry for row in rows for entry in entries_of(row, "url")]
    assert [(entry.key, entry.sizes) for entry in entries] == [
        (str(number), {"jpg": number, "txt": 7} if number % 2 else {"jpg": number})
        for number in range(count)
    ]
    told = [("table", {"shard": 0, "version": "v", **row}) for row in rows]
    choices = select(manifest([count]), told, lambda entry: "txt" in entry.sizes)
    assert numbers([count], choices) == list(range(1, count, 2))


@pytest.mark.parametrize(
    "change",
    [
        {"version": "w"},
        {"samples": 8},
        {"first": 1},
        {"shard": 1},
        {"shard": None},
        {"keys": 1},
        {"sizes": {"jpg": []}},
    ],
    ids=str,
)
def test_a_table_of_other_shards_is_refused(change: dict[str, object]) -> None:
    """One that was replaced since, cut off, or is no table at all."""
    row = {"shard": 0, "version": "v", **next(rows_of(tables(9)))}
    assert select(manifest([9]), [("t", row)], bool) == (None,)
    with pytest.raises(ConfigError, match="table"):
        select(manifest([9]), [("t", row | change)], bool)
    with pytest.raises(ConfigError, match="does not cover this shard"):
        select(manifest([9, 9]), [("t", row)], bool)


@examples(10)
@given(st.integers(0, 12_000), st.integers(0, 2_000))
def test_plan_sent_in_pieces_is_the_plan(shards: int, start: int) -> None:
    """However long it is and wherever it begins, the pieces make up the same reading order."""
    known = manifest([3] * 12_000)
    # Mostly in order.
    now = [number - 5 if number % 10 == 7 else number for number in range(shards)]
    plan = Plan.of(known, 3, now, lambda: now[::-1])
    start = min(start, plan.reads)
    (kind, first), *others = plan.messages(start)
    assert kind == "plan"
    assert {name for name, _ in others} <= {"extend"}
    pieces = [first["order"], *(fields["order"] for _, fields in others)]
    assert all(len(piece) <= (4_000 if number else 1_000) for number, piece in enumerate(pieces))
    assert [*chain.from_iterable(pieces)] == [*now, *now[::-1]][start:]
    assert first["epoch"] == 3
    assert first["reads"] == plan.reads - start
    assert first["shards"] == (known.fingerprint,)


def test_a_plan_names_the_shards_beside_each() -> None:
    """In the order of need; those of another dataset of a mixture have others, or none."""
    images, captions, latents, labels = (
        Manifest.of(ShardRef(f"{name}{number}") for number in range(count))
        for name, count in (("img", 3), ("cap", 3), ("lat", 2), ("web", 2))
    )
    joined = replace(
        images,
        columns=(
            JoinedManifest("cap.", captions),
            JoinedManifest("lat.", latents, ((0,), (0, 1), ())),
        ),
    )
    mixed = Manifest.concatenated([labels, joined])
    for manifest, first in ((joined, 0), (mixed, 2)):
        plan = Plan.of(manifest, 0, [first + 2, first + 1], lambda first=first: [first])
        ((_, fields),) = plan.messages()
        planned = [plan.shards[number].url for number in fields["order"]]
        assert planned == ["img2", "cap2", "img1", "cap1", "lat0", "lat1", "img0", "cap0", "lat0"]
        assert plan.reads == 6
    assert mixed.joined_to(1) == {}
    assert fields["shards"] == tuple(
        each.fingerprint for each in (labels, images, captions, latents)
    )
