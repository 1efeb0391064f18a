"""A daemon that keeps single parts of objects is killed in a few places: `make faults` has all."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from campaign import part_churn, range_stories
from campaign.harness import QUICK, Result, Row, rows
from campaign.kill_audit import audit, look
from campaign.lives import FLAGS, Death, Ground, Story, copy_folder, die_and_recover
from shardcache.store.folder.layout import PART
from support.cases import first_quick
from support.disks.shim import HAS_CC, Action
from support.programs.daemon import Daemon
from support.programs.zygote import Zygote
from support.stores.buckets import MotoS3
from support.stores.canary import Canary

needs_cc = pytest.mark.skipif(not HAS_CC, reason="the shim needs a C compiler")

# In the middle of the story each time: of a part's bytes, of its record, of an eviction.
DEATHS = [
    ("ranges, evicted", Death(Action.KILL_BEFORE, 61)),
    ("ranges, evicted", Death(Action.KILL_HALF, 30)),
    ("ranges from S3", Death(Action.KILL_HALF, 12)),
    ("ranges, then the whole", Death(Action.KILL_AFTER, 20)),
    ("ranges of a shard half fetched", Death(Action.KILL_BEFORE, 9)),
    ("ranges of a replaced object", Death(Action.KILL_HALF, 14)),
]


@pytest.fixture(scope="module")
def told(
    zygote: Zygote, moto_server: MotoS3, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ground]:
    """The stories of ranges, and a folder for the lives that follow them."""
    folder = tmp_path_factory.mktemp("r")
    with Canary() as web:
        stories = range_stories.stories(zygote, moto_server, web, folder)
        yield Ground(zygote, {story.name: story for story in stories}, folder)


@needs_cc
@pytest.mark.parametrize("case", first_quick(DEATHS))
def test_killed_daemon_loses_no_part(case: tuple[str, Death], told: Ground, tmp_path: Path) -> None:
    """Parts that were granted are there, right, and counted as what they take of the disk."""
    name, death = case
    result = Result(name)
    die_and_recover(told.zygote, told.stories[name], death, tmp_path / "life", result)
    assert result.passed, result.first_failure or result


def some_parts(told: Ground, root: Path) -> Story:
    """Lay a cache folder with some parts out in a folder; return its story."""
    story = told.stories["ranges, taken over"]
    assert story.template is not None
    copy_folder(story.template, root / "cache")
    return story


@needs_cc
@pytest.mark.slow
def test_audit_notices_a_part_that_is_lost(told: Ground, tmp_path: Path) -> None:
    """It is fetched again, which shows that it was gone."""
    story = some_parts(told, tmp_path)
    found = look(tmp_path / "cache", story.source)
    min((tmp_path / "cache").glob(f"partial/*{PART}")).unlink()
    with Daemon(tmp_path, *FLAGS, spawn=told.zygote.spawn) as daemon:
        problems = audit(daemon, story.source, found, reads_ranges=True)
    assert "lost" in {kind for kind, _ in problems}


@needs_cc
def test_look_notices_parts_with_other_bytes(told: Ground, tmp_path: Path) -> None:
    """A bit is flipped in one of them."""
    story = told.stories["ranges, verified and evicted"]
    assert story.template is not None
    copy_folder(story.template, tmp_path / "cache")
    assert len(look(tmp_path / "cache", story.source).spoilt) == 1


@pytest.mark.slow
@rows(part_churn.ROWS)
def test_readers_of_many_versions_in_a_small_cache(row: Row, tmp_path: Path) -> None:
    """Each range has the bytes of the version that its grant names, within the cache's bounds."""
    with part_churn.ground(tmp_path, QUICK) as field:
        row.check(field)
