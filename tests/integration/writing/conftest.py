"""A folder of files for `shardcache write`."""

import random
from pathlib import Path

import pytest


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder with 40 images and captions in two classes, and what is no sample."""
    folder = tmp_path / "photos"
    rng = random.Random(0)
    for number in range(40):
        place = folder / ("dog" if number % 2 else "cat")
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number:03d}.jpg").write_bytes(rng.randbytes(2_000))
        (place / f"{number:03d}.txt").write_text(f"photo {number}")
    (folder / "README").write_text("no extension")
    (folder / ".DS_Store").write_text("hidden")
    return folder
