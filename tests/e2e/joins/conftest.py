"""Datasets of images joined with captions."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shardcache_client.dataset import Joined, ShardDataset
from support.programs.daemon import Daemon
from support.shards.joined import Make, write


@pytest.fixture(scope="module")
def indexes(folder: Path) -> dict[str, str]:
    """The index files of images, and of captions in another order inside their shards."""
    captions = write(
        folder / "cap", "txt", lambda number, samples: random.Random(number).shuffle(samples)
    )
    return {"img": write(folder / "img", "jpg"), "cap": captions}


@pytest.fixture
def make(daemon: Daemon, indexes: dict[str, str]) -> Make:
    """A function that makes the dataset anew, as each process of a job would."""

    def make_joined(
        captions: str = indexes["cap"], own: Mapping[str, Any] | None = None, **options: Any
    ) -> Joined:
        images = ShardDataset(indexes["img"], socket=daemon.socket, **options)
        return Joined(
            {"": images, "cap": ShardDataset(captions, socket=daemon.socket)}, **(own or {})
        )

    return make_joined
