"""Servers that many tests need: one of each kind per run, and a fresh bucket per test."""

import gc
import os
import re
import signal
import tempfile
from collections.abc import AsyncIterator, Generator, Iterator, MutableMapping
from pathlib import Path

import pytest
from hypothesis import settings

from reached import record
from shardcache.origin.registry import Origins
from support.programs import cli
from support.programs.daemon import Daemon
from support.programs.zygote import Zygote
from support.stores.buckets import Bucket, MotoS3, new_bucket, use_aws
from support.stores.faulty_s3 import FaultyS3
from support.stores.seaweedfs import SeaweedFS

# Options of the daemon, credentials and places of stores, proxies, ranks set by a launcher, a
# service manager's sockets, and what changes the look of terminals.
_OTHERS = re.compile(
    r"(?:SHARDCACHE|AWS|GOOGLE|GCS|AZURE|HF|FSSPEC|XDG)_"
    r"|(?:SLURM|PMI|OMPI|TORCHELASTIC|LISTEN|WATCHDOG)_"
    r"|(?:https?|ftp|all|no)_proxy$|(?:REQUESTS|CURL)_CA_BUNDLE$"
    r"|(?:(?:LOCAL|GROUP|NODE|ROLE)_)?RANK$|(?:(?:LOCAL|GROUP|ROLE)_)?WORLD_SIZE$"
    r"|MASTER_(?:ADDR|PORT)$"
    r"|NOTIFY_SOCKET$|(?:NO|FORCE|CLI)COLOR|(?:NO|FORCE)_COLOR$|COLUMNS$|LINES$",
    re.IGNORECASE,
)

_NOWHERE = "http://127.0.0.1:1/"
"""An instance's metadata service that refuses every connection."""


def isolate(folder: Path, env: MutableMapping[str, str] = os.environ) -> None:
    """Take the machine's part out of an environment, with an empty home and config in `folder`.

    The daemon at the default socket and the config file in /etc are hidden by the variables that
    come before them. Other users may enter the folder, for some tests change to one.
    """
    for name in [name for name in env if _OTHERS.match(name)]:
        del env[name]
    home = folder / "home"
    config = folder / "shardcache.toml"
    (home / ".aws").mkdir(parents=True)
    # A variable of AWS would have each daemon obtain credentials as it starts.
    (home / ".aws" / "config").write_text(
        f"[default]\nec2_metadata_service_endpoint = {_NOWHERE}\n"
    )
    config.touch()
    folder.chmod(0o755)
    env["HOME"] = str(home)
    env["SHARDCACHE_CONFIG"] = str(config)
    env["SHARDCACHE_SOCKET"] = str(folder / "none.sock")
    # torch looks up its peers' names, which a name server may leave unanswered.
    env["RES_OPTIONS"] = "timeout:1 attempts:1"


def heed_interrupts() -> None:
    """Let SIGINT end this process and those that it starts, even in a shell's background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# How long an example takes says more of the machine's other users than of the code. A change is
# judged by examples that the next one is judged by, too; people look for new ones, by
# RANDOM_EXAMPLES=1, and can keep what they find. A checkout that cannot be written to has no place
# for examples that failed; those that are always the same need none.
looks_for_new = "RANDOM_EXAMPLES" in os.environ
settings.register_profile(
    "full",  # of `make test-slow`, which runs all properties again
    deadline=None,
    # Half of the default; `support.cases.examples` is for tests of large and of small spaces.
    max_examples=50,
    derandomize=not looks_for_new,
    database=settings.default.database if looks_for_new and os.access(Path(), os.W_OK) else None,
)
settings.register_profile("quick", settings.get_profile("full"), max_examples=10)
settings.load_profile("quick")


def pytest_configure(config: pytest.Config) -> None:
    """Hide the machine that the tests run on, before any of them is imported."""
    folder = tempfile.TemporaryDirectory(prefix="shardcache-tests-")
    config.add_cleanup(folder.cleanup)
    isolate(Path(folder.name))
    heed_interrupts()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage while the tests are imported: nearly all that is made then stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Keep the tests' imports out of garbage collections, in this process and in its forks."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def collected() -> Iterator[None]:
    """Collect a module's garbage before the next one, as abandoned loaders take seconds."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def reached(request: pytest.FixtureRequest) -> None:
    """Record which functions a module's tests call, where `make coverage` asks for it."""
    if folder := os.environ.get("REACHED"):
        name = str(request.path.relative_to(request.config.rootpath)).replace("/", "+")
        os.environ["REACHED_FILE"] = str(Path(folder, name))
        record(Path(folder, name))


@pytest.fixture(scope="session", autouse=True)
def zygote() -> Iterator[Zygote]:
    """Process to fork `shardcache` from by default, as a new interpreter takes a second."""
    with Zygote() as zygote, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Daemon, "usual_spawn", zygote.spawn)
        patch.setattr(cli, "usual_run", zygote.run)
        yield zygote


@pytest.fixture(scope="session")
def moto_server() -> Iterator[MotoS3]:
    """An S3 server in this process."""
    with MotoS3() as server:
        yield server


@pytest.fixture(scope="session")
def seaweedfs_server() -> Iterator[SeaweedFS]:
    """A real S3 server of its own; starting takes some seconds."""
    with SeaweedFS() as server:
        yield server


@pytest.fixture
def moto(moto_server: MotoS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bucket:
    """A fresh bucket on moto."""
    use_aws(monkeypatch, tmp_path, moto_server.env())
    return new_bucket(moto_server)


@pytest.fixture
def seaweedfs(
    seaweedfs_server: SeaweedFS, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Bucket:
    """A fresh bucket on SeaweedFS."""
    use_aws(monkeypatch, tmp_path, seaweedfs_server.env())
    return new_bucket(seaweedfs_server)


@pytest.fixture
async def origins() -> AsyncIterator[Origins]:
    """Origins without any table."""
    found = Origins((), max_connections=4)
    yield found
    await found.close()


@pytest.fixture
async def faulty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[FaultyS3]:
    """A server that misbehaves as told; this process's AWS variables point at it."""
    async with FaultyS3() as server:
        use_aws(monkeypatch, tmp_path, server.env())
        yield server
