"""Secrets stay where they were put, and show in no place where people or programs look."""

import ast
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardcache
import shardcache_client
from shardcache_client.dataset import ShardDataset
from support.programs.cli import shardcache as run_shardcache
from support.programs.daemon import Daemon
from support.programs.guard import GUARD_S
from support.shards.tars import make_tar, random_samples
from support.stores.canary import Canary

MARK = "m4rk3d"  # part of every secret below
CONFIG = """
[[origin]]
match = "{server}"
storage_options = {{ headers = {{ Authorization = "Bearer {mark}-header", X-Key = "{mark}-key" }} }}

[[origin]]
match = "s3://bucket/"
endpoint_url = "{server}"
storage_options = {{ key = "AKIA{mark}", secret = "{mark}-secret", token = "{mark}-token" }}
"""
SIGNED = f"?X-Amz-Credential={MARK}&X-Amz-Signature={MARK}&sig={MARK}&token={MARK}"


@pytest.fixture
def server() -> Iterator[Canary]:
    """A store that keeps the requests that it gets."""
    with Canary() as running:
        running.files |= {f"/{name}.tar": make_tar(random_samples(3)) for name in ("a", "b")}
        running.files["/no.tar"] = b"no tar at all" * 100
        running.redirects["/r.tar"] = 302, f"https://u:{MARK}@elsewhere/x?sig={MARK}"
        running.redirects["/s.tar"] = 302, f"ftp://elsewhere/x?sig={MARK}"
        yield running


@pytest.fixture
def daemon(tmp_path: Path, server: Canary) -> Iterator[Daemon]:
    """A daemon that was told secrets by file and environment, and logs all that it can."""
    config = tmp_path / "c.toml"
    token = tmp_path / "token"
    config.write_text(CONFIG.format(server=server.url(""), mark=MARK))
    token.write_text(f"{MARK}-{MARK}-{MARK}")
    for path in (config, token):
        path.chmod(0o600)
    env = {
        "AWS_ACCESS_KEY_ID": f"AKIA{MARK}",
        "AWS_SECRET_ACCESS_KEY": MARK,
        "AWS_SESSION_TOKEN": MARK,
    }
    flags = (
        "--config",
        str(config),
        "--log-level",
        "debug",
        "--attempts",
        "2",
        "--http-token-file",
        str(token),
    )
    with Daemon(tmp_path, *flags, env=env) as running:
        yield running


def exercise(daemon: Daemon, server: Canary) -> list[str]:
    """Succeed and fail in every way that takes little time; return all that was answered."""
    urls = [
        server.url(f"/{name}.tar{SIGNED}") for name in ("a", "{a,b}", "missing", "no", "r", "s")
    ]
    urls += [f"http://u:{MARK}@127.0.0.1:{server.port}/a.tar", f"s3://AKIA:{MARK}@bucket/a.tar"]
    urls += ["s3://bucket/missing.tar", "s3://bucket/", f"https://127.0.0.1:1/a.tar{SIGNED}"]
    urls += [server.url(f"/{path}{SIGNED}") for path in ("index.json", "*.tar", "")]
    said = [daemon.request("POST", "/v1/warm", {"urls": [url]}).decode() for url in urls]
    for url in urls[2:]:
        try:
            list(ShardDataset(url, socket=daemon.socket, timeout_s=GUARD_S, samples_per_epoch=None))
        except shardcache.errors.ShardcacheError as exn:
            said.append(f"{exn} {exn!r} {exn.to_json()}")
    return said


def without_what_was_asked(text: str) -> list[str]:
    """Return the lines that are no more than the echo of what the very user asked."""
    rows = [json.loads(line) for line in text.splitlines()]
    return [json.dumps(row) for row in rows if row.get("event") != "shard"]


@pytest.mark.slow
def test_secrets_show_nowhere(daemon: Daemon, server: Canary, tmp_path: Path) -> None:
    """Log, status, errors, process list and cache files have none, even after failures."""
    said = exercise(daemon, server)
    shown = "".join(
        line
        for text in said
        for line in (without_what_was_asked(text) if text[:1] == "{" else [text])
    )
    for command in (
        ["status"],
        ["status", "--json"],
        ["ls"],
        ["ls", "--json"],
        ["verify", "--json"],
    ):
        ran = run_shardcache(*command, socket=daemon.socket)
        shown += ran.out + ran.err
    shown += Path(f"/proc/{daemon.pid}/cmdline").read_text()
    assert "/a.tar?X-Amz-Credential=REDACTED" in shown  # it is shown, that much of it
    assert MARK not in shown
    daemon.stop()
    assert MARK not in daemon.log.read_text()
    assert "uid=" in daemon.log.read_text()
    files = [path for path in daemon.cache_dir.rglob("*") if path.is_file()]
    assert any(path.suffix == ".idx" for path in files)
    assert [path for path in files if MARK.encode() in path.read_bytes()] == []
    # The secrets were in use.
    assert any(MARK in value for _, _, headers in server.requests for value in headers.values())


def test_signed_url_is_a_separate_shard(daemon: Daemon, server: Canary) -> None:
    """A forged signature is another url, and does not get what a good one has fetched."""
    first, second = (server.url(f"/a.tar?sig={number}") for number in (1, 2))
    for url in (first, second, first):
        daemon.request("POST", "/v1/warm", {"urls": [url]})
    assert sum(path.startswith("/a.tar") and "2" in path for path in server.paths) > 0
    assert [shard["url"] for shard in daemon.shards()] == [server.url("/a.tar?sig=REDACTED")] * 2


def test_samples_carry_no_signature(daemon: Daemon, server: Canary) -> None:
    """`__url__` goes into logs and error messages of training, and the shard is still read."""
    samples = list(
        ShardDataset(server.url(f"/a.tar{SIGNED}"), socket=daemon.socket, timeout_s=GUARD_S)
    )
    assert len(samples) == 3
    assert all(MARK not in sample["__url__"] for sample in samples)


# What runs code that it reads, and where it may be named all the same.
_DANGEROUS = {
    "pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "joblib",
    "yaml",
    "code",
    "imp",
    "runpy",
}
_CALLS = {"eval", "exec", "compile", "__import__", "execfile"}
_METHODS = {
    ("torch", "load"),
    ("numpy", "load"),
    ("np", "load"),
    ("pd", "read_pickle"),
    ("os", "system"),
    ("os", "popen"),
}
_EXCEPTIONS = {
    ("store/catalogue.py", "pickle"),  # the error with which it refuses
    # decode={"pkl": "pickle"}, which a user asks for by this name.
    ("samples/decoders.py", "pickle"),
    # Samples from a loader's own workers, in place of torch's queues, which unpickle.
    ("loading/parcel.py", "pickle"),
    ("origin/patterns/foreign_lists.py", "yaml"),  # its safe_load, which makes plain values alone
    # PickleBuffer, for values that go to torch's own queues.
    ("sharing/buffer.py", "pickle"),
}


def _found(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                yield from (alias.name.partition(".")[0] for alias in names)
            case ast.ImportFrom(module=str(module)):
                yield module.partition(".")[0]
            case ast.Call(func=ast.Name(id=name)) if name in _CALLS:
                yield name
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=owner), attr=name), keywords=keywords
            ) if (
                owner,
                name,
            ) in _METHODS and not _is_set(keywords, "weights_only"):
                if not _is_off(keywords, "allow_pickle"):
                    yield f"{owner}.{name}"
            case ast.Call(keywords=keywords) if _is_set(keywords, "shell"):
                yield "shell=True"


def _is_off(keywords: list[ast.keyword], name: str) -> bool:
    return any(
        word.arg == name and getattr(word.value, "value", True) is False for word in keywords
    )


def _is_set(keywords: list[ast.keyword], name: str) -> bool:
    return any(
        word.arg == name and getattr(word.value, "value", False) is True for word in keywords
    )


@pytest.mark.slow
def test_data_that_is_read_is_never_run() -> None:
    """Neither package has pickle, marshal, eval, yaml or a shell, but for named exceptions."""
    bad = _DANGEROUS | _CALLS | {".".join(names) for names in _METHODS} | {"shell=True"}
    found = {
        (os.path.relpath(path, root), name)
        for root in (
            Path(package.__file__ or "").parent for package in (shardcache, shardcache_client)
        )
        for path in root.rglob("*.py")
        for name in _found(path)
    }
    assert len(found) > 200
    assert {(path, name) for path, name in found if name in bad} == _EXCEPTIONS
