"""The conftest.py of webdataset's test suite, which its sdist lacks, and the tests' data.

Copied into the unpacked sdist. The environment says where the data are served (SUITE_DATA_URL), and
whether shardcache's WebDataset takes the place of webdataset's own (SUITE_DROP_IN).
"""

import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torchvision_on_cpu  # noqa: F401  # for the tests that import torchvision
import webdataset

local_data = "testdata/imagenet-000000.tgz"
compressed = "testdata/compressed.tar"
remote_loc = os.environ["SUITE_DATA_URL"]
remote_shard = "openimages-train-000321.tar"
remote_shards = "openimages-train-0000{00..03}.tar"
remote_sample = f"{remote_loc}sample.tgz"

if "SUITE_DROP_IN" in os.environ:
    from shardcache_client.webdataset import WebDataset

    webdataset.WebDataset = WebDataset


def pytest_configure(config: pytest.Config) -> None:
    for name in ("quick", "notorch"):
        config.addinivalue_line("markers", name)


def count_samples_tuple(
    source: Iterable[Any], *checks: Callable[[Any], bool], n: int = 10_000
) -> int:
    """Return the number of samples, at most `n`, all tuples, lists or dicts that pass."""
    count = 0
    for count, sample in enumerate(source, 1):
        assert isinstance(sample, tuple | list | dict)
        assert all(check(sample) for check in checks)
        if count == n:
            break
    return count
