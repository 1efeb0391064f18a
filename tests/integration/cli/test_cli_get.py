"""`shardcache get`: files of a prefix, pattern, index or url in a folder, and only there."""

import json
import os
import pty
import re
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from shardcache.cli.getting.placed_files import is_copy_of, open_folder, place_file
from shardcache.shared.protocol import ShardRef
from support.cases import first_quick
from support.disks.mounts import Tmpfs, may_mount
from support.network.scripted_server import answer
from support.programs.cli import Ran, shardcache
from support.programs.daemon import Daemon, eventually
from support.shards.tars import make_tar, random_samples
from support.stores.buckets import Bucket
from support.stores.canary import GatedStore
from support.stores.object_servers import HubServer

PART_BYTES = 64 * 1024
MODEL = {
    "config.json": b'{"layers": 2}',
    "model.safetensors": os.urandom(3 * PART_BYTES),
    "tokens/vocab.txt": b"a\nb\n",
}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    flags = (
        "--part-size",
        str(PART_BYTES),
        "--scrub-rate",
        "0",
        "--listing-ttl-s",
        "0",
        "--attempts",
        "1",
    )
    with Daemon(tmp_path_factory.mktemp("d"), *flags) as daemon:
        yield daemon


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for name, body in MODEL.items():
        path = tmp_path / "model" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
    return tmp_path / "model"


@pytest.fixture
def dest(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "out" / "llama"
    shutil.rmtree(tmp_path / "out", ignore_errors=True)  # links would keep their files cached


def get(daemon: Daemon, source: object, dest: object, *flags: str) -> Ran:
    return shardcache("get", str(source), str(dest), *flags, socket=daemon.socket)


def done(ran: Ran) -> dict[str, int]:
    """Return the numbers of files by what became of them."""
    last = json.loads(ran.out.splitlines()[-1])
    return {
        name: last[name]
        for name in ("linked", "cloned", "copied", "present", "failed")
        if name in last
    }


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def fetched(daemon: Daemon) -> int:
    return int(daemon.status()["counters"]["origin_bytes"])


@pytest.mark.parametrize("how", ["--copy", "--link"])
def test_files_of_a_prefix_are_in_the_folder_and_stay_when_it_runs_again(
    daemon: Daemon, model: Path, dest: Path, how: str
) -> None:
    """Names and folders are those below the prefix; the second run fetches and writes nothing."""
    before = fetched(daemon)
    ran = get(daemon, f"{model}/", dest, how, "--json")
    assert ran.code == 0, ran.err
    assert contents(dest) == MODEL
    assert sum(done(ran).values()) == 3
    assert ("linked" in done(ran)) == (how == "--link")
    times = {path: path.stat().st_mtime_ns for path in dest.rglob("*")}
    assert done(get(daemon, f"{model}/", dest, how, "--json")) == {"present": 3}
    assert times == {path: path.stat().st_mtime_ns for path in dest.rglob("*")}
    assert fetched(daemon) - before == sum(map(len, MODEL.values()))


def test_link_is_read_only_and_keeps_its_file_cached(
    daemon: Daemon, model: Path, dest: Path
) -> None:
    """It is the cache's own file until the link is gone or --copy replaces it."""
    get(daemon, model / "model.safetensors", dest, "--link")
    assert dest.stat().st_nlink == 2
    assert not stat.S_IMODE(dest.stat().st_mode) & 0o222
    eventually(lambda: daemon.leases() == 0)
    evicted = shardcache("evict", f"{model}/**", socket=daemon.socket)
    assert evicted.code == 1
    assert "hard link" in evicted.out
    get(daemon, model / "model.safetensors", dest, "--copy")
    assert dest.stat().st_nlink == 1
    assert os.access(dest, os.W_OK)
    eventually(lambda: shardcache("evict", f"{model}/**", socket=daemon.socket).code == 0)


@pytest.mark.slow
def test_links_filling_the_cache_are_errors(
    model: Path, dest: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The error says what holds the space, without a long wait, and copies free it."""
    for number in range(3):
        (model / f"{number}.bin").write_bytes(os.urandom(400_000))
    with Daemon(tmp_path_factory.mktemp("d"), "--scrub-rate", "0", capacity="1MB") as daemon:
        ran = get(daemon, f"{model}/*.bin", dest, "--link")
        assert ran.code == 1
        assert "2 linked, 1 failed" in ran.out
        assert "hard-linked" in ran.out
        ran = get(daemon, f"{model}/*.bin", dest, "--copy")
        assert ran.code == 0, ran.out
        assert len(contents(dest)) == 3


def test_links_are_the_default_only_where_this_user_cannot_write_to_them(
    daemon: Daemon, model: Path, dest: Path
) -> None:
    """Root, whom no mode stops from writing to the cache through a link, gets copies."""
    states = done(get(daemon, model / "config.json", dest, "--json"))
    assert ("linked" in states) == (os.geteuid() != 0)


def test_changed_and_newer_files_are_replaced(daemon: Daemon, model: Path, dest: Path) -> None:
    """A copy that somebody edited, and one whose object has another version by now."""
    get(daemon, f"{model}/", dest)
    (dest / "tokens/vocab.txt").write_bytes(b"edited")
    (model / "config.json").write_bytes(b'{"layers": 3}')
    ran = get(daemon, f"{model}/", dest, "--copy", "--json")
    assert contents(dest) == contents(model), ran.out
    assert done(ran)["present"] == 1, ran.out


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("{}/model.safetensors", ["model.safetensors"]),
        ("{}/*.json", ["config.json", "shards.json"]),
        ("{}/**/*.txt", ["tokens/vocab.txt"]),
        ("{}/{{config.json,tokens/vocab.txt}}", ["config.json", "tokens/vocab.txt"]),
        ("{}/tokens", ["vocab.txt"]),
        ("file://{}/tokens/", ["vocab.txt"]),
        ("{}/shards.json", ["a.tar"]),
    ],
)
def test_source_is_a_url_a_pattern_a_folder_or_an_index(
    daemon: Daemon, model: Path, dest: Path, source: str, names: list[str]
) -> None:
    """Names begin below the pattern's folder, and a .json that lists no shards is a file."""
    (model / "a.tar").write_bytes(make_tar(random_samples(2, {"bin": 10})))
    (model / "shards.json").write_text('{"wids_version": 1, "shardlist": [{"url": "a.tar"}]}')
    ran = get(daemon, source.format(model), f"{dest}/")
    assert ran.code == 0, ran.err
    assert sorted(contents(dest)) == names


def test_single_file_gets_the_name_of_the_destination(
    daemon: Daemon, model: Path, dest: Path
) -> None:
    """As with cp: below it, if it is a folder."""
    get(daemon, model / "config.json", dest)
    assert dest.read_bytes() == MODEL["config.json"]
    get(daemon, model / "config.json", dest.parent)
    assert (dest.parent / "config.json").read_bytes() == MODEL["config.json"]


def test_links_in_the_source_stand_for_their_files(daemon: Daemon, model: Path, dest: Path) -> None:
    """A folder of the Hub's cache consists of links."""
    (model / "link.json").symlink_to(model / "config.json")
    assert get(daemon, f"{model}/", dest).code == 0
    assert (dest / "link.json").read_bytes() == MODEL["config.json"]
    assert not (dest / "link.json").is_symlink()


@pytest.mark.slow
def test_runs_into_one_folder_do_not_disturb_each_other(
    daemon: Daemon, model: Path, dest: Path
) -> None:
    """Each replaces files at once and whole, by links or copies, and leaves nothing else."""
    with ThreadPoolExecutor(4) as pool:
        for how in ("--copy", "--link"):
            for ran in pool.map(lambda how: get(daemon, f"{model}/", dest, how), [how] * 4):
                assert ran.code == 0, ran.out
    assert contents(dest) == MODEL


def test_unusable_destination_is_an_error(daemon: Daemon, model: Path, tmp_path: Path) -> None:
    """As is a folder in the place of one file, which is named by its url."""
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        ran = get(daemon, f"{model}/", place)
        assert ran.code == 2
        assert f"cannot use the folder {place}" in ran.err
        assert "Traceback" not in ran.err
    (tmp_path / "out" / "config.json").mkdir(parents=True)
    ran = get(daemon, f"{model}/", tmp_path / "out")
    assert ran.code == 1
    assert f"failed  {model}/config.json: cannot write {tmp_path}/out/config.json" in ran.out


@pytest.mark.skipif(not may_mount(), reason="mounting takes root")
def test_full_destination_ends_the_command_at_the_first_file(
    daemon: Daemon, model: Path, tmp_path: Path
) -> None:
    with Tmpfs(tmp_path / "small", 2 * PART_BYTES) as small:
        ran = get(daemon, f"{model}/", small.folder)
        assert (small.folder / "config.json").exists()
        assert not (small.folder / "tokens" / "vocab.txt").exists()
    assert ran.code == 1
    assert f"no space left for {small.folder}/model.safetensors" in ran.err
    assert "failed" not in ran.out


def test_links_in_the_destination_lead_nowhere(
    daemon: Daemon, model: Path, dest: Path, tmp_path: Path
) -> None:
    """A link for a folder is an error, one for a file is replaced, and no target is touched."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"precious")
    dest.mkdir(parents=True)
    (dest / "tokens").symlink_to(outside)
    (dest / "config.json").symlink_to(outside / "precious")
    ran = get(daemon, f"{model}/", dest, "--json")
    assert ran.code == 1
    assert done(ran)["failed"] == 1
    assert contents(outside) == {"precious": b"precious"}
    assert (dest / "config.json").read_bytes() == MODEL["config.json"]
    assert not (dest / "config.json").is_symlink()


def test_failed_files_are_named_and_the_others_are_there(
    daemon: Daemon, model: Path, dest: Path
) -> None:
    """The exit code is 1, and a log has a line for each file."""
    ran = get(daemon, f"{model}/{{config.json,missing.bin,model.safetensors}}", dest)
    assert ran.code == 1
    assert "missing.bin" in ran.out
    assert "1 failed" in ran.out
    assert sorted(contents(dest)) == ["config.json", "model.safetensors"]


def text_on(terminal: int) -> Iterator[str]:
    """Yield what is written to a terminal until nobody has its other end open."""
    with suppress(OSError):  # EIO, once it is closed
        while more := os.read(terminal, 65_536).decode(errors="replace"):
            yield more


@pytest.mark.slow
def test_bars_show_each_file_and_the_whole(daemon: Daemon, dest: Path) -> None:
    """On a terminal; what is left on it in the end is the line of each file."""
    ours, theirs = pty.openpty()
    with GatedStore() as store:
        url = store.put("weights.bin", os.urandom(4 * PART_BYTES))
        store.let("weights.bin", 2 * PART_BYTES)
        args = ["shardcache", "get", url, str(dest), "--socket", str(daemon.socket)]
        process = subprocess.Popen(
            [sys.executable, "-m", *args],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "COLUMNS": "120"},
        )
        os.close(theirs)
        shown = ""
        with process:
            for text in text_on(ours):
                shown += text
                if "weights.bin" in shown and "131.1/262.1 kB" in shown:
                    store.let("weights.bin")
    os.close(ours)
    assert "0/1 files" in shown, shown
    assert "copied    262.1 kB" in shown, shown
    assert "1 file: 1 copied" in shown, shown


def test_copies_need_no_files_without_a_name(
    model: Path, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a filesystem that has none, where opening one is refused."""
    monkeypatch.setattr(os, "O_TMPFILE", 0)
    dest.mkdir(parents=True)
    with open_folder(dest) as place:
        source = model / "model.safetensors"
        ref = ShardRef(str(source), "1", source.stat().st_size)
        done = list[int]()
        for _ in range(2):
            state = place_file(source, place, ("sub", "a"), ref, done.append, links=False)
            assert state == "copied"
        assert is_copy_of(place, ("sub", "a"), ref)
        assert done[-1] == ref.size_bytes
    assert contents(dest) == {"sub/a": MODEL["model.safetensors"]}


@pytest.mark.slow
def test_repository_of_the_hub_is_fetched_by_its_name(
    dest: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Without a slash at the end: files in LFS and in git."""
    pytest.importorskip("huggingface_hub", minversion="2")
    with HubServer() as hub:
        hub.put_lfs("/org/llama/resolve/main/model.safetensors", MODEL["model.safetensors"])
        hub.put("/org/llama/resolve/main/sub/config.json", MODEL["config.json"])
        env = {"HF_ENDPOINT": hub.endpoint_url, "HF_TOKEN": hub.TOKEN}
        with Daemon(tmp_path_factory.mktemp("d"), env=env) as daemon:
            ran = get(daemon, "hf://org/llama", dest)
    assert ran.code == 0, ran.out + ran.err
    assert contents(dest) == {
        "model.safetensors": MODEL["model.safetensors"],
        "sub/config.json": MODEL["config.json"],
    }


def test_killed_daemon_is_waited_for_and_finished_parts_are_kept(
    daemon: Daemon, dest: Path
) -> None:
    """The next daemon goes on from the first's parts, and events say how far it is."""
    body = os.urandom(8 * PART_BYTES)
    before = fetched(daemon)
    with GatedStore() as store:
        url = store.put("weights.bin", body)
        store.let("weights.bin", 4 * PART_BYTES)
        found: list[Ran] = []
        running = threading.Thread(
            target=lambda: found.append(get(daemon, url, f"{dest}/", "--json"))
        )
        running.start()
        eventually(
            lambda: any(row["done_bytes"] >= 4 * PART_BYTES for row in daemon.status()["transfers"])
        )
        daemon.restart()
        store.let("weights.bin")
        running.join()
    events = [json.loads(line) for line in found[0].out.splitlines()]
    assert found[0].code == 0
    assert (dest / "weights.bin").read_bytes() == body
    assert [event["event"] for event in events if event["event"] != "progress"] == [
        "resolved",
        "file",
        "done",
    ]
    assert events[0]["total_bytes"] == len(body)
    assert events[-1]["done_bytes"] == len(body)
    assert before >= 0
    assert fetched(daemon) <= 4 * PART_BYTES


@pytest.mark.parametrize(
    "name", first_quick(["a\nb", "trailing ", "\x1b[2J", os.fsdecode(b"\xff")])
)
def test_name_that_is_no_url_fails_alone(
    daemon: Daemon, model: Path, dest: Path, name: str
) -> None:
    """The others come: one odd file does not refuse a folder."""
    (model / name).write_bytes(b"odd")
    ran = get(daemon, f"{model}/", dest, "--json")
    assert ran.code == 1, ran.err
    assert contents(dest) == MODEL
    assert done(ran)["failed"] == 1
    assert [json.loads(line)["event"] for line in ran.out.splitlines()].count("error") == 1


@pytest.mark.slow
def test_keys_that_are_no_paths_fail_alone(
    moto: Bucket, dest: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As object stores have them."""
    for key in ("m/a", "m/sub/b", "m/sub//c", "m/f "):
        moto.put(key, key.encode())
    with Daemon(tmp_path_factory.mktemp("d"), env=moto.env()) as daemon:
        ran = get(daemon, f"{moto.url}/m/", dest, "--json")
    assert ran.code == 1, ran.err
    assert contents(dest) == {"a": b"m/a", "sub/b": b"m/sub/b"}
    assert done(ran)["failed"] == 2


def test_cached_file_comes_while_its_store_fails(daemon: Daemon, dest: Path) -> None:
    """The version that is cached is the last known one."""
    with GatedStore() as store:
        url = store.put("weights.bin", b"weights")
        store.let("weights.bin")
        assert get(daemon, url, dest / "first").code == 0
        daemon.await_publication()
        store.words = answer(b"", status="500 Internal Server Error")
        ran = get(daemon, url, dest / "second", "--json")
    assert ran.code == 0, ran.out
    assert (dest / "second").read_bytes() == b"weights"
    assert json.loads(ran.out.splitlines()[0])["total_bytes"] == len(b"weights"), (
        "its size was known at the start"
    )


def test_missing_file_of_a_web_server_is_not_found(daemon: Daemon, dest: Path) -> None:
    """The error does not blame the server's lack of listings."""
    with GatedStore() as store:
        ran = get(daemon, store.url("/missing.bin"), dest)
    assert ran.code == 1
    assert "404" in ran.out
    assert "cannot list" not in ran.out + ran.err


def test_folders_are_made_for_files_that_come(
    model: Path, dest: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Not while an earlier run's copies are looked for."""
    (model / "large").mkdir()
    (model / "large" / "a.bin").write_bytes(os.urandom(2_000_000))
    with Daemon(tmp_path_factory.mktemp("d"), "--scrub-rate", "0", capacity="1MB") as daemon:
        ran = get(daemon, f"{model}/", dest, "--copy")
    assert ran.code == 1, ran.out
    assert contents(dest) == MODEL
    assert not (dest / "large").exists()


@pytest.mark.slow
def test_command_ends_soon_after_its_daemon_was_stopped(
    dest: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It waits as long as a restart takes, not for minutes."""
    with (
        Daemon(tmp_path_factory.mktemp("d"), "--part-size", str(PART_BYTES)) as daemon,
        GatedStore() as store,
    ):
        url = store.put("weights.bin", os.urandom(4 * PART_BYTES))
        store.let("weights.bin", 2 * PART_BYTES)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(get, daemon, url, f"{dest}/")
            eventually(lambda: bool(daemon.status()["transfers"]))
            assert daemon.stop() == 0
            ran = running.result()
    assert ran.code == 3
    (wait_s,) = re.findall(r"retrying for up to (\d+) s", ran.err)
    assert int(wait_s) <= 30


@pytest.mark.slow
@pytest.mark.parametrize("step", ["listing", "fetching"])
def test_command_ends_soon_after_its_daemon_froze(
    dest: Path, tmp_path_factory: pytest.TempPathFactory, step: str
) -> None:
    """It waits for days for a store, but for a frozen daemon only as long as for a restart."""
    with (
        Daemon(tmp_path_factory.mktemp("d"), "--part-size", str(PART_BYTES)) as daemon,
        GatedStore() as store,
    ):
        url = store.put("weights.bin", os.urandom(4 * PART_BYTES))
        if step == "fetching":
            store.let("weights.bin", PART_BYTES)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(get, daemon, url, f"{dest}/")
            if step == "fetching":
                eventually(lambda: any(row["done_bytes"] for row in daemon.status()["transfers"]))
            else:
                eventually(lambda: bool(store.requests))
            daemon.pause()
            ran = running.result()
    assert ran.code == 3
    assert "the daemon does not answer" in ran.err
    assert f"shardcache status --socket {daemon.socket}" in ran.err
