"""Stories of daemons until they are killed."""

from __future__ import annotations

import pytest

from campaign.kills.life import Story
from campaign.kills.stories import stories
from support.programs.zygote import Zygote
from support.stores.moto_s3 import MotoS3


@pytest.fixture(scope="module")
def told(zygote: Zygote, moto_server: MotoS3, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Story]:
    """The stories by name."""
    return {story.name: story for story in stories(zygote, moto_server, tmp_path_factory.mktemp("k"))}
