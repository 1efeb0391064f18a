"""Start, refusal to start, and end of `shardcache serve`."""

from pathlib import Path

import pytest

from support.programs.cli import Ran, shardcache
from support.programs.daemon import Daemon, eventually, spawn


def refused(folder: Path, *args: str | Path, config: str = "") -> Ran:
    """Run `serve`, which is expected to end by itself; with a config file of the given text."""
    (folder / "shardcache.toml").write_text(config)
    return shardcache("serve", "--config", folder / "shardcache.toml", "--socket", folder / "s.sock", *args)


def test_cache_dir_below_a_file_is_refused(tmp_path: Path) -> None:
    """A cache folder that cannot be made is an error that names it, and no socket stays behind."""
    (tmp_path / "file").touch()
    ran = refused(tmp_path, "--cache-dir", tmp_path / "file" / "cache")
    assert ran.code == 1 and str(tmp_path / "file" / "cache") in ran.err and "What to do:" in ran.err
    assert "Traceback" not in ran.err and not (tmp_path / "s.sock").exists()


@pytest.mark.slow
def test_the_first_reader_does_not_wait_for_the_sdk(tmp_path: Path) -> None:
    """The modules that S3 needs are imported in the background, before a reader asks for them."""
    with Daemon(tmp_path, env={"PYTHONPROFILEIMPORTTIME": "1"}, spawn=spawn) as daemon:
        eventually(lambda: "shardcache.origin.s3_sdk" in daemon.log.read_text())


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--capacity", "lots"),
        ("--capacity", "120%"),
        ("--attempts", "0"),
        ("--part-size", "1kB"),
        ("--capacity", "50"),
        ("--capacity", "0%"),
    ],
)
def test_value_that_makes_no_sense_is_a_usage_error(flag: str, value: str, tmp_path: Path) -> None:
    """A bad value exits 2 and names its option."""
    ran = refused(tmp_path, "--cache-dir", tmp_path / "cache", flag, value)
    assert ran.code == 2 and f"{flag}: " in ran.err


@pytest.mark.parametrize(
    ("config", "line", "meant"),
    [
        ("# sizes\ncapactiy = '1GB'", 2, "capacity"),
        ("part-size = '8MB'", 1, "part_size"),
        ("[[origin]]\nmatch = 's3://a/'\n\n[[origin]]\nmatch = 's3://b/'\nendpoint = 'http://c'", 6, "endpoint_url"),
        ("[[allow]]\nprefix = 's3://a/'\n[[allow]]\nprefix = 's3://b/'\nuser = ['root']", 3, "users"),
        ("[[allow]]\nprefx = 's3://a/'", 1, "prefix"),
    ],
)
def test_a_misspelt_option_is_shown_with_its_line_and_the_one_that_was_meant(
    config: str, line: int, meant: str, tmp_path: Path
) -> None:
    """At the top, in [[origin]] and in [[allow]]: file, line and the nearest name that there is."""
    ran = refused(tmp_path, "--cache-dir", tmp_path / "cache", config=config)
    assert ran.code == 2 and f"{tmp_path}/shardcache.toml, line {line}: " in ran.err, ran.err
    assert f"did you mean {meant!r}?" in ran.err


def test_a_value_is_blamed_on_where_it_was_given(tmp_path: Path) -> None:
    """The variable, or the line of the file; a limit reads as people write sizes."""
    ran = shardcache("serve", "--cache-dir", tmp_path / "cache", env={"SHARDCACHE_MAX_BANDWIDTH": "1kB"})
    assert ran.code == 2 and "$SHARDCACHE_MAX_BANDWIDTH: at least 65.5 kB" in ran.err
    ran = shardcache("serve", "--cache-dir", tmp_path / "cache", env={"SHARDCACHE_ORIGIN": "s3://b/"})
    assert ran.code == 2 and "$SHARDCACHE_ORIGIN: write the tables as a list in JSON" in ran.err
    ran = refused(tmp_path, "--cache-dir", tmp_path / "cache", config="[origin]\nmatch = 's3://b/'")
    assert ran.code == 2 and "write [[origin]]" in ran.err


def test_odd_but_harmless_options_are_warnings(tmp_path: Path) -> None:
    """A capacity beyond the disk, and a variable that nothing reads, with the one that was meant; parts are rounded."""
    with Daemon(tmp_path, "--part-size", "8MB", capacity="900PB", env={"SHARDCACHE_CAPCITY": "1TB"}) as daemon:
        log = daemon.log.read_text()
    assert "capacity of 900.0 PB exceeds the size of its filesystem" in log
    assert "meant=SHARDCACHE_CAPACITY" in log and "name=SHARDCACHE_CAPCITY" in log


def test_socket_and_cache_dir_in_use_are_refused(tmp_path: Path) -> None:
    """A second daemon exits 1 and leaves the first one alone: each would evict what the other serves."""
    with Daemon(tmp_path) as daemon:
        for socket, folder in ((daemon.socket, tmp_path / "other"), (tmp_path / "other.sock", daemon.cache_dir)):
            ran = shardcache("serve", "--socket", socket, "--cache-dir", folder)
            assert ran.code == 1 and str(daemon.socket if socket == daemon.socket else folder) in ran.err
        assert shardcache("status", socket=daemon.socket).code == 0
