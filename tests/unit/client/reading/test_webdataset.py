"""The drop-in for webdataset.WebDataset: its arguments, and its refusals before any daemon."""

import importlib
import inspect
import sys
from collections.abc import Iterable, Iterator
from types import MappingProxyType
from typing import Any

import pytest
import webdataset

from shardcache.errors import ConfigError
from shardcache_client.webdataset import WebDataset

URL = "s3://bucket/{000..007}.tar"


def own_splitter(shards: Iterable[Any]) -> Iterator[Any]:
    """Give every shard to everyone."""
    yield from shards


def test_arguments_are_those_of_webdataset() -> None:
    """An argument by position or by name means the same, with an equal default."""
    theirs = list(inspect.signature(webdataset.WebDataset.__init__).parameters.values())
    ours = list(inspect.signature(WebDataset.__init__).parameters.values())
    assert [p.name for p in ours[: len(theirs)]] == [p.name for p in theirs]
    differing = {p.name for p, q in zip(ours, theirs, strict=False) if p.default != q.default}
    # `handler` raises in either; `url_to_name` is without effect here.
    assert differing == {"handler", "url_to_name"}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"rename_files": str.upper}, "rename_files"),
        ({"mode": "shuffled"}, "mode='shuffled'"),
        ({"nodesplitter": own_splitter}, "nodesplitter"),
        ({"workersplitter": own_splitter}, "workersplitter"),
        ({"workersplitter": None}, "workersplitter"),
        ({"resampled": True, "workersplitter": own_splitter}, "workersplitter"),
        ({"urls": {"datasets": []}}, "yaml"),
        ({"urls": MappingProxyType({"datasets": []})}, "yaml"),
        ({"urls": "mixture.yaml"}, "yaml"),
        ({"urls": "pipe:aws s3 cp s3://bucket/0.tar -"}, "pipe:aws"),
    ],
)
def test_unsupported_arguments_are_refused_with_a_remedy(
    arguments: dict[str, Any], complaint: str
) -> None:
    """An argument that would change which samples come is never left aside in silence."""
    with pytest.raises(ConfigError, match=complaint) as caught:
        WebDataset(**{"urls": URL} | arguments)
    assert caught.value.remedy


def test_the_error_says_what_to_install_without_webdataset(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is optional; whoever imports the module without it is told its name."""
    monkeypatch.setitem(sys.modules, "webdataset", None)
    monkeypatch.delitem(sys.modules, "shardcache_client.webdataset")
    with pytest.raises(ImportError, match="pip install webdataset"):
        importlib.import_module("shardcache_client.webdataset")
