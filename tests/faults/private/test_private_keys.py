"""Temporary keys of a user's jobs: renewed ones reach the daemon, and old ones do no harm."""

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from shardcache.errors import AccessDeniedError
from shardcache_client.reader import ShardReader
from support.programs.cli import shardcache
from support.programs.daemon import PrivateHome
from support.programs.guard import GUARD_S
from support.programs.raw_session import RawSession
from support.shards.tars import make_tar
from support.stores.faulty_s3 import FaultyS3

pytestmark = pytest.mark.slow


def fill(store: FaultyS3) -> list[str]:
    """Store two shards of a sample each, named by its key; return their urls."""
    return [
        store.put(f"{key}.tar", make_tar([{"__key__": key, "txt": b"text"}])) for key in ("a", "b")
    ]


def use(keys: str, store: FaultyS3, patch: pytest.MonkeyPatch) -> None:
    """Give this process the temporary keys of an id and its renewals, none from a file."""
    use_user(keys, store, patch)
    patch.setenv("AWS_SESSION_TOKEN", f"token-of-{keys}")
    patch.setenv("AWS_CREDENTIAL_EXPIRATION", f"of {keys}")


def use_user(keys: str, store: FaultyS3, patch: pytest.MonkeyPatch) -> None:
    """Have this process keys of an id that do not expire."""
    for name, value in store.env().items():
        patch.setenv(name, value)
    patch.setenv("AWS_ACCESS_KEY_ID", keys)
    patch.setenv("AWS_SECRET_ACCESS_KEY", f"secret-of-{keys}")
    patch.delenv("AWS_SESSION_TOKEN", raising=False)


def use_profile(keys: str, store: FaultyS3, patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Have this process the keys of a profile, which are in a file alone."""
    for name, value in store.env().items():
        patch.setenv(name, value)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        patch.delenv(name, raising=False)
    file = folder / "credentials"
    file.write_text(f"[renewed]\naws_access_key_id = {keys}\naws_secret_access_key = secret\n")
    patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    patch.setenv("AWS_PROFILE", "renewed")


async def read(url: str) -> list[str]:
    """Return the keys of all samples, read through this user's private daemon."""

    def keys() -> list[str]:
        return [sample["__key__"] for sample in ShardReader(url, timeout_s=GUARD_S)]

    return await asyncio.to_thread(keys)


def caches(home: PrivateHome) -> list[Path]:
    """Return the folders of this user's private caches."""
    return [folder for folder in home.caches.iterdir() if folder.is_dir()]


async def test_renewed_keys_reach_the_daemon_that_is_there(
    home: PrivateHome, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One daemon and cache fetch nothing again, though the former keys are refused by then."""
    first, second = fill(faulty)
    use("old", faulty, monkeypatch)
    faulty.access_key = "old"
    assert await read(first) == ["a"]
    before = home.pids()
    use("new", faulty, monkeypatch)
    faulty.access_key = "new"
    fetched = [key for method, key, *_ in faulty.seen if method == "GET"]
    assert await read(second) == ["b"]
    assert await read(first) == ["a"]
    assert home.pids() == before
    assert len(caches(home)) == 1
    fetched_since = [key for method, key, *_ in faulty.seen if method == "GET"][len(fetched) :]
    assert "a.tar" not in fetched_since


async def test_rotated_keys_of_a_user_reach_the_daemon_that_is_there(
    home: PrivateHome, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As temporary ones do; the former keys are denied by then."""
    first, second = fill(faulty)
    use_user("old", faulty, monkeypatch)
    faulty.permits = {"old": ""}
    assert await read(first) == ["a"]
    before = home.pids()
    use_user("new", faulty, monkeypatch)
    faulty.permits = {"new": ""}
    assert await read(second) == ["b"]
    assert home.pids() == before
    assert len(caches(home)) == 1


@pytest.mark.parametrize("use_role", [use, use_user], ids=["temporary", "of users"])
async def test_jobs_of_two_roles_share_a_daemon(
    use_role: Callable[[str, FaultyS3, pytest.MonkeyPatch], None],
    home: PrivateHome,
    faulty: FaultyS3,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each reads what its own keys permit, in any order, and is denied what neither may."""
    urls = {
        key: faulty.put(f"{key}/a.tar", make_tar([{"__key__": key, "txt": b"text"}]))
        for key in ("one", "two")
    }
    faulty.put("three/a.tar", b"")
    faulty.permits = {"one": "one/", "two": "two/"}
    for role, url in urls.items():
        use_role(role, faulty, monkeypatch)
        assert await read(url) == [role]
    for role, url in urls.items():
        use_role(role, faulty, monkeypatch)
        faulty.put(f"{role}/b.tar", make_tar([{"__key__": f"{role}-b", "txt": b"text"}]))
        assert await read(url.replace("a.tar", "b.tar")) == [f"{role}-b"]
    with pytest.raises(AccessDeniedError):
        await read(f"s3://{faulty.bucket}/three/a.tar")
    assert len(home.running()) == 1


async def test_keys_of_all_sessions_that_last_are_used(
    home: PrivateHome, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty jobs read at the same time, each a folder that its own keys alone may read."""
    roles = [f"role{number}" for number in range(20)]
    urls = [
        faulty.put(f"{role}/a.tar", make_tar([{"__key__": role, "txt": b"text"}])) for role in roles
    ]
    faulty.permits = {role: f"{role}/" for role in roles}
    use_user(roles[0], faulty, monkeypatch)
    assert await read(urls[0]) == [roles[0]]
    (socket,) = home.running()

    def answers() -> list[str]:
        with ExitStack() as stack:
            sessions = []
            for role in roles:
                keys = {"AWS_ACCESS_KEY_ID": role, "AWS_SECRET_ACCESS_KEY": f"secret-of-{role}"}
                sessions.append(stack.enter_context(RawSession(socket, credentials=keys)))
            for session, url in zip(sessions, urls, strict=True):
                session.plan([url], [0])
            return [str(session.take(0)["type"]) for session in sessions]

    granted = await asyncio.to_thread(answers)
    assert len(granted) == len(roles)
    assert set(granted) <= {"leased", "arriving"}


async def test_keys_of_the_session_that_reads_sign_its_requests(
    home: PrivateHome, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store's log has no other key of the user's, even for shards fetched ahead."""
    roles = ["one", "two", "three"]
    urls = {
        role: [
            faulty.put(f"{role}/{number}.tar", make_tar([{"__key__": role, "txt": b""}]))
            for number in range(3)
        ]
        for role in roles
    }
    faulty.permits = {role: f"{role}/" for role in roles}
    use_user("one", faulty, monkeypatch)
    assert await read(urls["one"][0]) == ["one"]
    (socket,) = home.running()

    def prefetch() -> None:
        deadline_s = time.monotonic() + GUARD_S
        with ExitStack() as stack:
            for role in roles:
                keys = {"AWS_ACCESS_KEY_ID": role, "AWS_SECRET_ACCESS_KEY": f"secret-of-{role}"}
                session = stack.enter_context(RawSession(socket, credentials=keys))
                session.plan(urls[role], [0, 1, 2])
            while len({key for method, key, *_ in list(faulty.seen) if method == "GET"}) < 9:
                assert time.monotonic() < deadline_s, faulty.seen
                time.sleep(0.05)
        warmed = shardcache(
            "warm", faulty.put("one/3.tar", make_tar([{"__key__": "3", "txt": b""}]))
        )
        assert warmed.code == 0, warmed.err

    await asyncio.to_thread(prefetch)
    asked = {
        (key.partition("/")[0], asker)
        for (_, key, *_), asker in zip(faulty.seen, faulty.askers, strict=True)
    }
    assert asked == {(role, role) for role in roles}


async def test_renewed_keys_in_a_file_reach_the_daemon_that_is_there(
    home: PrivateHome, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The daemon reads a profile's file again once its keys have expired, whoever renewed them."""
    first, second = fill(faulty)
    use_profile("old", faulty, monkeypatch, tmp_path)
    faulty.access_key = "old"
    assert await read(first) == ["a"]
    before = home.pids()
    use_profile("new", faulty, monkeypatch, tmp_path)
    faulty.access_key = "new"
    assert await read(second) == ["b"]
    assert home.pids() == before
    assert len(caches(home)) == 1


async def test_commands_hand_over_renewed_keys(
    home: PrivateHome, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command hands over the keys of its own environment, as readers do."""
    first, second = fill(faulty)
    use("old", faulty, monkeypatch)
    faulty.access_key = "old"
    assert await read(first) == ["a"]
    use("new", faulty, monkeypatch)
    faulty.access_key = "new"
    warmed = await asyncio.to_thread(shardcache, "warm", second)
    assert warmed.code == 0, warmed.err
    assert len(home.running()) == 1


async def test_keys_that_have_expired_do_not_displace_newer_ones(
    home: PrivateHome, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old job reads on with the keys of another, even if the daemon has just met both."""
    first, second = fill(faulty)
    use("new", faulty, monkeypatch)
    faulty.access_key = "new"
    assert await read(first) == ["a"]
    use("old", faulty, monkeypatch)
    assert await read(second) == ["b"]
    assert len(home.running()) == 1


async def test_keys_are_written_to_no_file(
    home: PrivateHome, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither names, nor the log, nor the cache."""
    first, second = fill(faulty)
    for keys, url in (("one", first), ("two", second)):
        use(keys, faulty, monkeypatch)
        await read(url)
    home.kill()
    files = [
        path
        for folder in (home.runtime, home.caches)
        for path in folder.rglob("*")
        if path.is_file()
    ]
    assert files
    assert not [
        path
        for path in files
        if b"secret-of-" in path.read_bytes() or b"token-of-" in path.read_bytes()
    ]
