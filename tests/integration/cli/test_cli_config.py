"""Commands without a daemon: `shardcache config`, completion, and commands that find no daemon."""

import socket
from pathlib import Path
from typing import Any

import pytest

from support.programs.cli import shardcache

CONFIG = """
capacity = "500GB"
max_transfers = 7

allow = ["s3://a/", "https://user:hidden-1@b/"]

[[origin]]
match = "s3://a/"
endpoint_url = "https://me:hidden-2@minio:9000"
storage_options = { key = "hidden-3", headers = { Authorization = "hidden-4" }, use_ssl = true }
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A config file with secrets wherever one can be."""
    path = tmp_path / "shardcache.toml"
    path.write_text(CONFIG)
    return path


def options(*args: str | Path, env: dict[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """Return what `config show --json` says of each option."""
    ran = shardcache("config", "show", "--json", *args, env=env)
    assert ran.code == 0, ran.err
    return {row["name"]: row for row in ran.json["options"]}


def test_each_value_has_its_source(file: Path) -> None:
    """A flag wins over the environment, then file and default. The source is named."""
    env = {
        "SHARDCACHE_MAX_TRANSFERS": "9",
        "SHARDCACHE_ATTEMPTS": "3",
        "SHARDCACHE_ORIGIN": '[{"match": "s3://b/"}]',
    }
    found = options("--config", file, "--attempts", "5", env=env)
    seen = {name: (row["value"], row["source"], row["place"]) for name, row in found.items()}
    assert seen["attempts"] == (5, "flag", "--attempts")
    assert seen["max_transfers"] == (9, "environment", "$SHARDCACHE_MAX_TRANSFERS")
    assert seen["capacity"] == (500 * 10**9, "file", f"capacity in {file}, line 2")
    assert seen["origin"][0][0]["match"] == "s3://b/"
    assert seen["origin"][1] == "environment"
    assert seen["min_free"] == ("5%", "default", None)
    assert options(env={"SHARDCACHE_CONFIG": str(file)})["max_transfers"]["value"] == 7


def test_secrets_are_not_shown(file: Path) -> None:
    """Passwords in urls and values of storage_options are redacted, their names are not."""
    for flags in ((), ("--json",)):
        ran = shardcache("config", "show", "--config", file, *flags)
        assert ran.code == 0
        assert "hidden" not in ran.out + ran.err
        assert all(
            name in ran.out for name in ("minio:9000", "Authorization", "https://REDACTED@b/")
        )


def test_config_show_prints_values_as_people_write_them(file: Path) -> None:
    """Sizes with units, defaults in words, and a warning for a variable that nothing reads."""
    ran = shardcache("config", "show", "--config", file, env={"SHARDCACHE_CAPCITY": "1"})
    rows = [" ".join(line.split()) for line in ran.out.splitlines()]
    assert f"capacity 500.0 GB capacity in {file}, line 2" in rows
    assert "max-bandwidth no limit default" in rows
    assert "http off default" in rows
    assert "warning: nothing reads $SHARDCACHE_CAPCITY; did you mean SHARDCACHE_CAPACITY?" in rows


def test_a_valid_file_passes(file: Path) -> None:
    """Exit 0, with the options that it sets."""
    summary = shardcache("config", "check", file).out
    assert summary == f"{file}: valid; sets capacity, allow, max_transfers, origin\n"
    assert shardcache("config", "check", "--json", file).json == {
        "file": str(file),
        "valid": True,
        "options": ["capacity", "allow", "max_transfers", "origin"],
    }


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ("capacity = 'much'", "capacity in {}, line 1: "),
        (
            "[[origin]]\nmatch = 's3://a/'\nendpoint = 'x'",
            "origin.0.endpoint in {}, line 3: unknown option; did you",
        ),
        ("capacity: 1GB", "cannot read {}: "),
        (
            "[[origin]]\nmatch = 's3://a/'\nprice_per_gb = inf",
            "origin.0.price_per_gb in {}, line 3: ",
        ),
        (
            "[[origin]]\nmatch = 's3://a/'\nprice_per_1000_requests = nan",
            "price_per_1000_requests in {}, line 3: ",
        ),
        ("listing_ttl_s = inf", "listing_ttl_s in {}, line 1: "),
        (
            "[[origin]]\nmatch = 's3://a/'\n[origin.storage_options]\n"
            "[[origin]]\nmatch = 's3://b/'\nregoin = 'x'",
            "origin.1.regoin in {}, line 6: unknown option; did you mean 'region'",
        ),
        (
            "[[origin]]\nmatch = 'gs://a/'\nanon = true\nregion = 'x'",
            "origin.0.region in {}, line 4: gs:// has no such setting; remove it",
        ),
    ],
)
def test_an_invalid_file_is_a_usage_error_with_its_line(config: str, told: str, file: Path) -> None:
    """Exit 2 comes with the nearest known name, whatever the variables are."""
    file.write_text(config)
    env = {"SHARDCACHE_CAPACITY": "1TB", "SHARDCACHE_ATTEMPTS": "0"}
    ran = shardcache("config", "check", "--json", file, env=env)
    assert ran.code == 2
    assert ran.json["error"]["code"] == "config"
    assert told.format(file) in ran.json["error"]["message"]
    assert "ATTEMPTS" not in ran.err
    assert "What to do: " in ran.err


def test_every_invalid_option_is_named(file: Path) -> None:
    """One run is enough to mend a file. A missing file or a folder is not an empty one."""
    file.write_text("attempts = 0\nlog_level = 'loud'\n")
    told = shardcache("config", "check", file).err
    assert "attempts in" in told
    assert "log_level in" in told
    for path in (file.parent / "none.toml", file.parent):
        assert shardcache("config", "check", path).code == 2


# Commands that find no daemon

URL = "s3://bucket/a.tar"
COMMANDS = [
    ("status",),
    ("top",),
    ("warm", URL),
    ("ls",),
    ("evict", URL),
    ("verify",),
    ("dashboard", "--no-open"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_missing_socket_exits_3_with_the_command_to_start_one(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    """Each command that needs a daemon exits 3 and prints how to start one at that socket."""
    ran = shardcache(*command, socket=tmp_path / "none.sock")
    assert ran.code == 3
    assert ran.out == ""
    assert f"shardcache serve --socket {tmp_path}/none.sock --cache-dir" in ran.err


def test_socket_of_a_killed_daemon_exits_3(tmp_path: Path) -> None:
    """It may come from $SHARDCACHE_SOCKET, and --json has the error in place of the result."""
    path = tmp_path / "left.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    ran = shardcache("status", "--json", env={"SHARDCACHE_SOCKET": str(path)})
    assert ran.code == 3
    assert ran.json["error"]["code"] == "no_daemon"
    assert ran.json["error"]["url"] == str(path)


# Completion, by the script that docs/commands.md describes


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("sta", {"plain,status"}),
        ("serve --cap", {"plain,--capacity"}),
        ("serve --log-format ", {"plain,text", "plain,json"}),
        ("config ch", {"plain,check"}),
        ("warm sha", {"file,sha"}),
        ("serve --cache-dir sha", {"file,sha"}),
        ("config check sha", {"file,sha"}),
    ],
)
def test_commands_options_values_and_paths_are_completed(line: str, offered: set[str]) -> None:
    """Commands, options and values are offered by their beginning, paths by the shell."""
    words = f"shardcache {line}"
    asked = {
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
        "_SHARDCACHE_COMPLETE": "bash_complete",
    }
    assert set(shardcache(env=asked).out.splitlines()) == offered
