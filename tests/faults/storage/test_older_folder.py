"""A cache folder of an older release is taken over whole, and a newer one is refused by the daemon itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from campaign.kills.life import Death, Story, die_and_recover
from campaign.result import Result
from shardcache.store.folder import FORMAT
from support.disks.shim import HAS_CC, Action
from support.programs.cli import shardcache
from support.programs.zygote import Zygote


@pytest.mark.slow
@pytest.mark.skipif(not HAS_CC, reason="the shim needs a C compiler")
def test_killed_while_it_is_taken_over_it_has_all_its_shards(
    zygote: Zygote, told: dict[str, Story], tmp_path: Path
) -> None:
    """Killed before each of the calls that number it: the next start serves every shard and fetches none again."""
    result = Result("kills", "take over")
    for at in range(1, 6):  # it is made, written, flushed, renamed, and the folder flushed
        die_and_recover(zygote, told["take over"], Death(Action.KILL_BEFORE, at), tmp_path / str(at), result)
    assert result.passed, result.first_failure
    assert result.injected == 5


@pytest.mark.skipif(not HAS_CC, reason="the shim needs a C compiler")
@pytest.mark.parametrize("at", [30, 90])
def test_killed_while_pinning_nothing_is_lost(zygote: Zygote, told: dict[str, Story], tmp_path: Path, at: int) -> None:
    """Wherever it dies, the folder is sound: no shard lost, none miscounted, nothing lies about."""
    result = Result("kills", "pin")
    die_and_recover(zygote, told["pin"], Death(Action.KILL_BEFORE, at), tmp_path / "d", result)
    assert result.passed, result.first_failure


def test_a_newer_folder_ends_the_start_with_what_to_do(tmp_path: Path) -> None:
    """`serve` exits 1 with the error's remedy, and leaves the folder as it is."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "format").write_text(f"{FORMAT + 1}\n")
    ran = shardcache("serve", "--cache-dir", tmp_path / "cache", "--min-free", "0", socket=tmp_path / "s")
    assert ran.code == 1 and f"has format {FORMAT + 1}" in ran.err and "What to do: start the newer release" in ran.err
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["format"]
