"""The table of url protocols."""

from __future__ import annotations

import importlib

import pytest
from fsspec.registry import known_implementations

from shardcache.access.urls import S3, STORES, row_of
from shardcache.origin.base import Origin


@pytest.mark.parametrize("protocol", ["s3", "https", "file", "gs", "smb", "git"])
def test_each_row_names_an_origin(protocol: str) -> None:
    """The class that a row names exists, and is an `Origin`."""
    module, _, name = row_of(protocol).origin.partition(":")
    assert Origin in getattr(importlib.import_module(module), name).__mro__


@pytest.mark.parametrize("protocol", sorted(known_implementations.keys() & STORES - set(S3.names)))
def test_the_package_of_a_store_is_the_one_that_fsspec_imports(protocol: str) -> None:
    """`pip install` with the package of a row brings the filesystem that fsspec wants for the protocol."""
    wanted = known_implementations[protocol]["class"].partition(".")[0]
    assert row_of(protocol).package.replace("-", "_") == wanted
