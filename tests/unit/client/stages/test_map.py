"""Users' functions on samples: results are yielded, errors name sample and line."""

from typing import Any

import pytest

from shardcache.errors import DecodeError
from shardcache_client.stages.map import Map
from shardcache_client.stages.pipeline import Pipeline


def sample(**members: Any) -> dict[str, Any]:
    """Return a sample with these members."""
    return {"__key__": "a", "__url__": "file:///s.tar", **members}


def test_functions_are_applied_in_order() -> None:
    """Each gets what the one before has returned, which need not be a sample."""
    pipeline = (
        Pipeline()
        .then(Map(lambda each: each["cls"]))
        .then(Map(int))
        .then(Map(lambda number: number + 1))
    )
    assert pipeline(sample(cls=b"41")) == 42
    assert not pipeline.leaves_out


def test_function_that_wants_a_missing_member_names_the_present_ones() -> None:
    """Its KeyError names one member, the error all that the sample has."""
    with pytest.raises(DecodeError, match=r"KeyError: 'jpg', .*; it has: png, cls\)"):
        Pipeline().then(Map(lambda each: each["jpg"]))(sample(png=b"1", cls=b"2"))


def test_exception_of_a_function_names_sample_and_line() -> None:
    """Though the item is no longer a sample by then."""
    pipeline = Pipeline().then(Map(len)).then(Map(lambda item: item / 0))
    expected = r"the sample 'a' could not be decoded \(ZeroDivisionError.*test_map\.py:\d+"
    with pytest.raises(DecodeError, match=expected) as caught:
        pipeline(sample())
    assert caught.value.url == "file:///s.tar"


@pytest.mark.parametrize("error", [StopIteration, GeneratorExit])
def test_exception_that_would_end_an_epoch_in_silence_is_an_error(
    error: type[BaseException],
) -> None:
    """A generator or a worker would take it for its own end."""

    def fail(_: object) -> None:
        raise error

    with pytest.raises(DecodeError, match=error.__name__):
        Pipeline().then(Map(fail))(sample())
