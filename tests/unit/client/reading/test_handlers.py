"""handlers.py: WebDataset's handlers, by name and answer, here and there."""

from __future__ import annotations

import pytest
import webdataset

import shardcache_client
from shardcache.errors import NotATarError
from shardcache_client import handlers

EXN = NotATarError("is a text file", url="s3://bucket/a.tar")
NAMES = ["ignore_and_continue", "ignore_and_stop", "warn_and_continue", "warn_and_stop"]
THREE = [{"__key__": key, "txt": text} for key, text in (("a", b"1"), ("b", b"two"), ("c", b"3"))]


def to_number(sample: dict[str, object]) -> dict[str, object]:
    """Decode, or raise ValueError."""
    return {"number": int(sample["txt"])}  # type: ignore[call-overload]


def test_reraise_raises() -> None:
    """The default handler raises what it was given."""
    with pytest.raises(NotATarError) as caught:
        handlers.reraise(EXN)
    assert caught.value is EXN


def test_silent_handlers_answer() -> None:
    """True goes on, False stops."""
    assert handlers.ignore_and_continue(EXN) is True
    assert handlers.ignore_and_stop(EXN) is False


def test_warning_handlers_warn_and_answer() -> None:
    """The warning is the error's whole text, with the url."""
    with pytest.warns(UserWarning, match=r"s3://bucket/a\.tar: is a text file"):
        assert handlers.warn_and_continue(EXN) is True
    with pytest.warns(UserWarning, match=r"s3://bucket/a\.tar: is a text file"):
        assert handlers.warn_and_stop(EXN) is False


@pytest.mark.parametrize(
    ("exn", "said"), [(KeyError("jpg"), r"KeyError\('jpg'\)"), (AssertionError(), "AssertionError")]
)
def test_a_warning_about_a_foreign_error_names_its_kind(exn: Exception, said: str) -> None:
    """A decoder's errors often say little; what they are is said in any case."""
    with pytest.warns(UserWarning, match=said):
        handlers.warn_and_continue(exn)


def test_a_warning_points_at_who_asked_the_handler() -> None:
    """So that Python's filters by module can tell warnings apart."""
    with pytest.warns(UserWarning) as caught:
        handlers.warn_and_stop(EXN)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_they_answer_as_webdatasets_do(name: str) -> None:
    """A pipeline that moves over from WebDataset keeps its meaning."""
    assert getattr(shardcache_client, name)(EXN) == getattr(webdataset, name)(EXN)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_they_work_in_webdatasets_stages(name: str) -> None:
    """A decoding stage of WebDataset's goes on or stops by our handler as by its own, whatever the error is."""
    ours, theirs = (
        list(webdataset.filters.map(to_number, handler=getattr(module, name))(iter(THREE)))
        for module in (shardcache_client, webdataset)
    )
    assert ours == theirs
    assert [sample["number"] for sample in ours] == ([1, 3] if "continue" in name else [1])
