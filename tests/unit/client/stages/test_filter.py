"""Users' predicates on samples: refusals are left out, errors name their own line."""

from typing import Any

import pytest

from shardcache.errors import DecodeError
from shardcache_client.stages.filter import Filter
from shardcache_client.stages.item_stage import Dropped
from shardcache_client.stages.map import Map
from shardcache_client.stages.pipeline import Pipeline, PipelineBySource


def sample(**members: Any) -> dict[str, Any]:
    """Return a sample with these members."""
    return {"__key__": "a", "__url__": "file:///s.tar", **members}


def is_even(number: int) -> bool:
    """Return True for an even number."""
    return number % 2 == 0


@pytest.mark.parametrize("answer", [True, 1, "yes"])
def test_item_for_which_the_answer_is_true_is_yielded(answer: object) -> None:
    """The stage yields the very item, unchanged."""
    given = sample()
    assert Pipeline().then(Filter(lambda _: answer))(given) is given


@pytest.mark.parametrize("answer", [False, 0, "", None])
def test_item_for_which_the_answer_is_false_is_left_out(answer: object) -> None:
    """As Python's own `filter` takes it."""
    assert Pipeline().then(Filter(lambda _: answer))(sample()) is Dropped.FILTERED


def test_functions_after_a_filter_get_what_is_left() -> None:
    """They are not called for any other."""
    number = Map(lambda each: int(each["cls"]))
    pipeline = Pipeline().then(number).then(Filter(is_even)).then(Map(lambda even: 1 / even))
    assert pipeline(sample(cls=b"4")) == 0.25
    assert pipeline(sample(cls=b"5")) is Dropped.FILTERED


def test_pipeline_with_a_filter_leaves_samples_out() -> None:
    """Also that of a mixture of which one source has one."""
    filtered = Pipeline().then(Filter(bool))
    assert filtered.has_filters
    assert filtered.leaves_out
    assert PipelineBySource(sources={"a": Pipeline(), "b": filtered}).has_filters
    assert not PipelineBySource(sources={"a": Pipeline()}).has_filters


def test_filter_of_one_source_leaves_others_alone() -> None:
    """The filter of a mixture comes after those of its sources."""
    refused = Pipeline().then(Filter(lambda _: False))
    pipeline = PipelineBySource(sources={"a": Pipeline(), "b": refused}).then(
        Filter(lambda each: "cls" in each)
    )
    assert pipeline(sample(__source__="b", cls=b"1")) is Dropped.FILTERED
    assert pipeline(sample(__source__="a")) is Dropped.FILTERED
    assert pipeline(sample(__source__="a", cls=b"1"))["cls"] == b"1"


def test_exception_of_a_predicate_names_its_own_line() -> None:
    """Not that of the stage which calls it."""
    expected = r"the sample 'a' could not be decoded \(ZeroDivisionError.*test_filter\.py:\d+"
    with pytest.raises(DecodeError, match=expected):
        Pipeline().then(Filter(lambda _: 1 / 0))(sample())
