"""Stories of daemons until they are killed."""

from __future__ import annotations

import pytest

from campaign import lives
from support.programs.zygote import Zygote
from support.stores.moto_s3 import MotoS3


@pytest.fixture(scope="module")
def lived(zygote: Zygote, moto_server: MotoS3, tmp_path_factory: pytest.TempPathFactory) -> lives.Ground:
    """The stories, and a folder for the lives that follow them."""
    folder = tmp_path_factory.mktemp("k")
    return lives.Ground(zygote, lives.stories(zygote, moto_server, folder), folder)
