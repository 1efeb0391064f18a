"""Runs of `shardcache write` that end early, and folders that hold other shards."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardcache.cli.common import FAILED, USAGE
from support.disks.shim import FOR_EVER, HAS_CC, Action, Op, Shim
from support.programs.cli import clean_environment, shardcache
from support.programs.daemon import eventually
from support.programs.guard import GUARD_S
from support.programs.processes import running, wait_until_ended
from support.shards.tars import samples, shards

# One process, for each costs half a second of a core; the tests that are about several say how
# many.
ALONE = ("--workers", "1")


SIZE = ("--shard-size", "20kB", *ALONE)


needs_cc = pytest.mark.skipif(not HAS_CC, reason="needs a C compiler")


def recorded(out: Path) -> dict[str, list[int]]:
    """Return the shards in the journal of a run."""
    journal = out / ".shardcache-write.json"
    found: dict[str, list[int]] = (
        json.loads(journal.read_text())["shards"] if journal.exists() else {}
    )
    return found


def start(*args: Path | str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start the command."""
    command = [sys.executable, "-m", "shardcache", "write", *map(str, args)]
    return subprocess.Popen(
        command, env=clean_environment(env or {}), stderr=subprocess.PIPE, text=True
    )


@contextmanager
def held_back(path: Path) -> Iterator[Mapping[str, str]]:
    """Have an empty file, which is created, opened no sooner than at the end of the block.

    Yield the variables of the command that is to wait.
    """
    path.touch()
    shim = Shim(path.parent.parent.with_suffix(".shim"), root=path.parent)
    shim.arm(Action.HOLD, times=FOR_EVER, ops=(Op.OPEN,), match=path.name)
    try:
        yield shim.env()
    finally:
        shim.release()


@needs_cc
@pytest.mark.slow
def test_frozen_process_ends_the_run_with_its_shard_and_the_remedy(
    photos: Path, tmp_path: Path
) -> None:
    """A process that hangs is killed and its shard named; a rerun writes the rest."""
    out = tmp_path / "out"
    # The process waits for the file, so that it is certainly at work when it is stopped.
    with (
        held_back(photos / "dog" / "zzz.jpg") as env,
        start(photos, out, *SIZE, "--workers", "1", env=env) as run,
    ):
        try:
            # The journal has a draft as well.
            eventually(lambda: bool(list(out.glob(".shard-*.part"))))
            (worker,) = running(run.pid, "shardcache.writing.conversion")
            os.kill(worker, signal.SIGSTOP)
            _, err = run.communicate(timeout=GUARD_S)
        finally:
            run.kill()
    wait_until_ended(worker)
    assert run.returncode == 1
    assert "did not respond" in err
    assert "to resume, run the same command again" in err


@needs_cc
@pytest.mark.slow
def test_a_killed_run_is_resumed(photos: Path, tmp_path: Path) -> None:
    """kill -9 ends its processes and leaves no half shard; a rerun keeps what was complete."""
    last = photos / "dog" / "zzz.jpg"
    out = tmp_path / "out"
    last.touch()
    shardcache("write", photos, tmp_path / "fresh", *SIZE)
    fresh = shards(tmp_path / "fresh")
    table = out / "index.samples"
    listed = (tmp_path / "fresh" / "index.samples").read_bytes()
    # Only the last shard's process opens the file.
    with held_back(last) as env, start(photos, out, *SIZE, "--workers", "2", env=env) as run:
        try:
            eventually(
                lambda: (
                    len(recorded(out)) == len(fresh) - 1 and (out / f".{max(fresh)}.part").exists()
                )
            )
            workers = running(run.pid, "shardcache.writing.conversion")
        finally:
            run.send_signal(signal.SIGKILL)
    for pid in workers:
        wait_until_ended(pid)
    assert workers
    assert shards(out) == {name: data for name, data in fresh.items() if name != max(fresh)}
    complete = {path.name: path.stat().st_ino for path in out.glob("*.tar")}
    assert not (out / "index.json").exists()
    resumed = shardcache("write", photos, out, *SIZE, "--workers", "2", "--json")
    assert resumed.code == 0, resumed.err
    assert resumed.json["kept"] == len(complete)
    assert resumed.json["written"] == 1
    assert all((out / name).stat().st_ino == inode for name, inode in complete.items())
    assert shards(out) == fresh
    assert len(samples(out)) == 41
    assert not list(out.glob(".*.part"))
    assert table.read_bytes() == listed
    table.unlink()
    again = shardcache("write", photos, out, *SIZE, "--json")
    assert again.json["kept"] == len(fresh)
    assert again.json["members"] == resumed.json["members"]
    assert table.read_bytes() == listed


@needs_cc
@pytest.mark.slow
def test_input_that_changes_during_the_run_ends_it(photos: Path, tmp_path: Path) -> None:
    """Shards of the old and the new file never mix: an error comes, and no index."""
    gate = photos / "cat" / "000.png"
    changed = photos / "dog" / "039.jpg"
    with held_back(gate) as env:
        run = start(photos, tmp_path / "out", *SIZE, "--workers", "1", env=env)
        eventually((tmp_path / "out" / ".shard-000000.tar.part").exists)
        changed.write_bytes(bytes(2_000))
    with run:
        _, err = run.communicate()
    assert run.returncode == FAILED
    assert str(changed) in err
    assert "changed while" in err
    assert recorded(tmp_path / "out")
    assert not (tmp_path / "out" / "index.json").exists()


@pytest.mark.slow
def test_other_input_or_settings_never_mix(photos: Path, tmp_path: Path) -> None:
    """A changed file, size or order is an error that names it, and nothing is touched."""
    out = tmp_path / "out"
    shardcache("write", photos, out, *SIZE)
    before = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in out.iterdir()}
    refusals = [
        shardcache("write", photos, out, "--shard-size", "30kB"),
        shardcache("write", photos, out, *SIZE, "--shuffle", "1"),
    ]
    (photos / "cat" / "000.jpg").write_bytes(bytes(2_000))
    refusals.append(shardcache("write", photos, out, *SIZE))
    for ran, named in zip(
        refusals,
        ("shard_size_bytes: 20000 then, 30000 now", "shuffle: null then, 1 now", "input:"),
        strict=True,
    ):
        assert ran.code == USAGE
        assert named in ran.err
    assert {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in out.iterdir()} == before


@pytest.mark.slow
def test_shards_of_others_are_not_mixed_with(photos: Path, tmp_path: Path) -> None:
    """A destination with a shard that this command has not written is refused."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "old.tar").write_bytes(b"")
    assert "old.tar" in shardcache("write", photos, out, *SIZE).err
    assert [path.name for path in out.iterdir()] == ["old.tar"]
    (out / "old.tar").unlink()
    assert shardcache("write", photos, out, *SIZE).code == 0
    (out / "old.tar").write_bytes(b"")
    assert shardcache("write", photos, out, *SIZE).code == USAGE
