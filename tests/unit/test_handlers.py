"""handlers.py: WebDataset's handlers, by name and answer."""

from __future__ import annotations

import pytest
import webdataset

import shardcache_client
from shardcache.errors import NotATarError
from shardcache_client import handlers

EXN = NotATarError("is a text file", url="s3://bucket/a.tar")


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


@pytest.mark.parametrize("name", ["ignore_and_continue", "ignore_and_stop", "warn_and_continue", "warn_and_stop"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_they_answer_as_webdatasets_do(name: str) -> None:
    """A pipeline that moves over from WebDataset keeps its meaning."""
    assert getattr(shardcache_client, name)(EXN) == getattr(webdataset, name)(EXN)
