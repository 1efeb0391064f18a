"""A daemon that has just started: its preparations for readers, none of which can end it."""

import os
import signal
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from shardcache.errors import AccessDeniedError, ConfigError
from shardcache_client.reader import ShardReader
from support.cases import first_quick
from support.programs.daemon import Daemon, eventually, spawn
from support.programs.guard import GUARD_S
from support.programs.processes import running, transport_workers, wait_until_ended
from support.shards.tars import write_shards

INDEXER = "shardcache.store.indexing.indexer"
SHARDS = 2
SAMPLES = 3


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder with a short path, with shards in `data` and room for a daemon in `d`."""
    with tempfile.TemporaryDirectory(prefix="shardcache-s-") as folder:
        for name in ("data", "d"):
            Path(folder, name).mkdir()
        write_shards(Path(folder, "data"), SHARDS, SAMPLES, {"bin": 100})
        yield Path(folder)


def aws(root: Path, config: str, **more: str) -> Mapping[str, str]:
    """Return a user's variables with `config` as AWS config file and nothing else of AWS."""
    (root / "config").write_text(config)
    files = {
        "AWS_CONFIG_FILE": str(root / "config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(root / "none"),
    }
    return {"AWS_EC2_METADATA_DISABLED": "true", **files, **more}


def samples(url: str | Path, daemon: Daemon) -> int:
    """Read all samples of a url."""
    return sum(1 for _ in ShardReader(str(url), socket=daemon.socket, timeout_s=GUARD_S))


def test_processes_are_started_before_the_first_connection_is_handled(root: Path) -> None:
    """The first answer of a daemon comes after its transport worker and indexer start."""
    with Daemon(root / "d") as daemon:
        found = [len(transport_workers(daemon.pid)), len(running(daemon.pid, INDEXER))]
    assert found == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "more", "cause"),
    [
        ("", {"AWS_PROFILE": "long-gone"}, "long-gone"),
        ("[default\nregion", {}, "config file"),
    ],
    ids=["stale profile", "malformed file"],
)
def test_broken_aws_config_reaches_the_readers_of_s3_alone(
    config: str, more: dict[str, str], cause: str, root: Path
) -> None:
    """The reader of an s3:// url gets the error and its remedy; those of local urls read on."""
    with Daemon(root / "d", env=aws(root, config, **more)) as daemon:
        eventually(lambda: bool(transport_workers(daemon.pid)))
        with pytest.raises(ConfigError, match=cause) as told:
            samples("s3://bucket/a.tar", daemon)
        assert "AWS_" in told.value.remedy
        assert samples(f"{root}/data/", daemon) == SHARDS * SAMPLES
        assert daemon.stop() == 0


@pytest.mark.slow
def test_daemon_serves_once_s3_is_loaded(root: Path) -> None:
    """The first reader's first batch takes as long as any other's, if S3 is configured."""
    description = root / "models" / "s3" / "2099-01-01" / "service-2.json"
    description.parent.mkdir(parents=True)
    description.write_text("{")
    env = aws(root, "", AWS_DATA_PATH=str(root / "models"))
    with Daemon(root / "d", "--log-level", "debug", env=env, spawn=spawn) as daemon:
        log = daemon.log.read_text()
    served_at = log.index("cache_dir=")
    assert log.index("preparation failed") < served_at


def test_daemon_with_s3_configured_has_its_credentials_when_it_serves(root: Path) -> None:
    """The first answer comes after the SDK and credentials, so no reader competes with them."""
    keys = '{"Version": 1, "AccessKeyId": "key", "SecretAccessKey": "secret"}'
    (root / "issued").write_text(keys)
    config = (
        f"[default]\ncredential_process = sh -c 'echo asked >> {root}/asked; cat {root}/issued'\n"
    )
    with Daemon(root / "d", env=aws(root, config)):
        was_asked = (root / "asked").exists()
    assert was_asked


@pytest.mark.slow
def test_slow_credentials_do_not_delay_the_processes(root: Path) -> None:
    """A credential process that never answers delays neither workers nor indexers."""
    os.mkfifo(root / "silent")
    config = f"[default]\ncredential_process = cat {root}/silent\n"
    with Daemon(root / "d", env=aws(root, config)) as daemon:
        eventually(lambda: bool(running(daemon.pid, f"{root}/silent")))
        started = [len(transport_workers(daemon.pid)), len(running(daemon.pid, INDEXER))]
    assert started == [1, 1]


@pytest.mark.slow
def test_failed_preparation_does_not_end_the_daemon(root: Path) -> None:
    """Local urls are read whatever the SDK raises on loading, here over invalid JSON."""
    description = root / "models" / "s3" / "2099-01-01" / "service-2.json"
    description.parent.mkdir(parents=True)
    description.write_text("{")
    env = aws(root, "", AWS_DATA_PATH=str(root / "models"))
    with Daemon(root / "d", "--log-level", "debug", env=env, spawn=spawn) as daemon:
        eventually(lambda: "preparation failed" in daemon.log.read_text())
        assert samples(f"{root}/data/", daemon) == SHARDS * SAMPLES
        assert daemon.stop() == 0


ROLE = """[default]
role_arn = arn:aws:iam::123456789012:role/reader
source_profile = base
region = us-east-1
"""
PROFILES = [
    pytest.param("[default]\n", id="profile"),
    pytest.param(f"{ROLE}[profile base]\n", id="source of a role", marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("end", first_quick([signal.SIGTERM, signal.SIGKILL]))
def test_hanging_credential_process_ends_with_the_daemon(
    profile: str, end: signal.Signals, root: Path
) -> None:
    """However the daemon ends, the program that it waits for does not stay."""
    os.mkfifo(root / "silent")
    config = f"{profile}credential_process = cat {root}/silent\n"
    with Daemon(root / "d", env=aws(root, config)) as daemon:
        eventually(lambda: bool(running(daemon.pid, f"{root}/silent")))
        (program,) = running(daemon.pid, f"{root}/silent")
        os.kill(daemon.pid, end)
        daemon.wait()
    wait_until_ended(program)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "cause"),
    [
        ("echo hunter2; echo hunter2 >&2; exit 3", "it ended with status 3"),
        ("echo hunter2", "it printed no JSON"),
        ("echo [1]", "no JSON object"),
        ('echo "{\\"Version\\": 1, \\"AccessKeyId\\": \\"hunter2\\"}"', "no SecretAccessKey"),
    ],
    ids=["failure", "garbage", "list", "half"],
)
@pytest.mark.parametrize("profile", PROFILES)
def test_output_of_a_credential_process_is_in_no_error_or_log(
    profile: str, program: str, cause: str, root: Path
) -> None:
    """The error has cause and remedy, but no output of the program, which may be secret."""
    (root / "program").write_text(program)
    config = f"{profile}credential_process = sh {root}/program\n"
    with Daemon(root / "d", "--log-level", "debug", env=aws(root, config)) as daemon:
        with pytest.raises(AccessDeniedError, match=cause) as told:
            samples("s3://bucket/a.tar", daemon)
        assert "hunter2" not in f"{told.value} {told.value.remedy} {daemon.log.read_text()}"
