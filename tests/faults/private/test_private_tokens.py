"""Tokens of the Hub: one private daemon serves all jobs, each by what its token permits."""

import asyncio
from collections.abc import Iterator

import pytest

from shardcache.errors import AccessDeniedError, NotFoundError
from shardcache_client.reader import ShardReader
from support.programs.cli import shardcache
from support.programs.daemon import PrivateHome
from support.programs.guard import GUARD_S
from support.shards.tars import make_tar
from support.stores.object_servers import HubServer

pytest.importorskip("huggingface_hub", minversion="2", reason="pip install 'shardcache[hf]'")

ONE = "hf://datasets/org/one"
TWO = "hf://datasets/org/two"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A Hub with a token for each of two repositories, which have a shard in LFS and one in git."""
    with HubServer() as hub:
        for repository in ("one", "two"):
            folder = f"/datasets/org/{repository}"
            hub.tokens[f"hf_secret_{repository}"] = folder
            hub.put_lfs(
                f"{folder}/resolve/main/a.tar", make_tar([{"__key__": repository, "txt": b"a"}])
            )
            hub.put(
                f"{folder}/resolve/main/b.tar", make_tar([{"__key__": repository, "txt": b"b"}])
            )
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint_url)
        monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
        yield hub


async def read(url: str) -> list[tuple[str, bytes]]:
    """Return the keys and values of all samples, read through this user's private daemon."""

    def samples() -> list[tuple[str, bytes]]:
        return [
            (sample["__key__"], sample["txt"]) for sample in ShardReader(url, timeout_s=GUARD_S)
        ]

    return await asyncio.to_thread(samples)


@pytest.mark.slow
async def test_jobs_with_other_tokens_share_a_daemon(
    home: PrivateHome, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each job reads on with its own token, and a missing file is missing for both."""
    for repository, url in (("one", ONE), ("two", TWO)):
        monkeypatch.setenv("HF_TOKEN", f"hf_secret_{repository}")
        assert await read(f"{url}/a.tar") == [(repository, b"a")]
    for repository, url in (("one", ONE), ("two", TWO)):
        monkeypatch.setenv("HF_TOKEN", f"hf_secret_{repository}")
        assert await read(f"{url}/b.tar") == [(repository, b"b")]
        with pytest.raises(NotFoundError):
            await read(f"{url}/missing.tar")
    assert len(home.running()) == 1
    assert len([folder for folder in home.caches.iterdir() if folder.is_dir()]) == 1


@pytest.mark.slow
async def test_commands_hand_over_tokens(
    home: PrivateHome, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As readers do, also for a listing."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret_one")
    assert await read(f"{ONE}/a.tar") == [("one", b"a")]
    monkeypatch.setenv("HF_TOKEN", "hf_secret_two")
    warmed = await asyncio.to_thread(shardcache, "warm", f"{TWO}/")
    assert warmed.code == 0, warmed.err
    assert len(home.running()) == 1


@pytest.mark.slow
async def test_job_without_a_token_has_another_daemon(
    home: PrivateHome, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that forbids sending its token does, too. Neither reads with another's token."""
    monkeypatch.setenv("HF_HOME", str(home.root))  # where no token is kept
    monkeypatch.setenv("HF_TOKEN", "hf_secret_one")
    assert await read(f"{ONE}/a.tar") == [("one", b"a")]
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
    with pytest.raises(AccessDeniedError):
        await read(f"{ONE}/b.tar")
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(AccessDeniedError):
        await read(f"{ONE}/b.tar")
    assert len(home.running()) == 3


@pytest.mark.slow
async def test_tokens_are_written_to_no_file(
    home: PrivateHome, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither names, nor the log, nor the cache."""
    for repository, url in (("one", ONE), ("two", TWO)):
        monkeypatch.setenv("HF_TOKEN", f"hf_secret_{repository}")
        await read(f"{url}/a.tar")
        with pytest.raises(NotFoundError):
            await read(f"{url}/missing.tar")
    home.kill()
    files = [
        path
        for folder in (home.runtime, home.caches)
        for path in folder.rglob("*")
        if path.is_file()
    ]
    assert files
    assert not [path for path in files if b"hf_secret_" in path.read_bytes()]
