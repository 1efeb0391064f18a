"""handlers.py: WebDataset's handlers, by name and answer, here and there."""

import pytest
import webdataset

import shardcache_client
from shardcache.errors import NotATarError
from shardcache_client import handlers

EXN = NotATarError("is a text file", url="s3://bucket/a.tar")
NAMES = ["ignore_and_continue", "ignore_and_stop", "warn_and_continue", "warn_and_stop"]
THREE = [{"__key__": key, "txt": text} for key, text in (("a", b"1"), ("b", b"two"), ("c", b"3"))]


@pytest.mark.parametrize(
    ("exn", "text"),
    [
        (EXN, r"s3://bucket/a\.tar: is a text file"),
        (KeyError("jpg"), r"KeyError\('jpg'\)"),
        (OSError(), "OSError"),
    ],
)
def test_warnings_have_the_text_and_the_place_of_the_caller(exn: Exception, text: str) -> None:
    """Our whole text or a foreign error's kind, and the file by which filters tell them."""
    for handler, answer in ((handlers.warn_and_continue, True), (handlers.warn_and_stop, False)):
        with pytest.warns(UserWarning, match=text) as caught:
            assert handler(exn) is answer
        assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_handlers_work_in_webdatasets_stages(name: str) -> None:
    """Our handler continues or stops a decoding stage of WebDataset, whatever the error."""
    ours, theirs = (
        list(
            webdataset.filters.map(
                lambda sample: int(sample["txt"]), handler=getattr(module, name)
            )(iter(THREE))
        )
        for module in (shardcache_client, webdataset)
    )
    assert ours == theirs == ([1, 3] if "continue" in name else [1])
