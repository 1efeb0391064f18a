"""What daemons are killed in: their stories, and the process that they are forked from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from campaign.kills.life import Story
from campaign.kills.stories import stories
from support.moto_s3 import MotoS3
from support.zygote import Zygote


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    """What daemons are forked from."""
    with Zygote() as zygote:
        yield zygote


@pytest.fixture(scope="module")
def told(zygote: Zygote, moto_server: MotoS3, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Story]:
    """The stories by name."""
    return {story.name: story for story in stories(zygote, moto_server, tmp_path_factory.mktemp("k"))}
