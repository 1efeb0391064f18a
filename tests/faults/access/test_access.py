"""Nothing is fetched from a forbidden place, and no path or text leaves where it belongs."""

import io
import json
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from campaign import access
from campaign.harness import QUICK, Row, rows
from shardcache.access.rules import AllowList, AllowRule
from shardcache.config.origin_table import OriginTable
from shardcache.errors import NotAllowedError, OriginError, ShardcacheError
from shardcache.origin.registry import Origins
from shardcache.store.folder.layout import JOURNAL, PART, SIDECAR, TAR, Layout
from shardcache.store.keys import is_key, shard_key
from shardcache_client.dataset import ShardDataset
from support.cases import first_quick
from support.network.lead import lead
from support.programs.cli import shardcache
from support.programs.daemon import Daemon
from support.programs.guard import GUARD_S
from support.programs.raw_session import RawSession
from support.shards.tars import make_tar, random_samples
from support.stores.canary import Canary

DATA = make_tar(random_samples(3))


@pytest.fixture
def server() -> Iterator[Canary]:
    """The server that may be asked; its file is /data/a.tar."""
    with Canary() as running:
        running.files["/data/a.tar"] = DATA
        yield running


@pytest.fixture
def canary() -> Iterator[Canary]:
    """The server that may not be asked, with the same file."""
    with Canary() as running:
        running.files["/data/a.tar"] = DATA
        yield running


@pytest.fixture
async def fenced(server: Canary) -> AsyncIterator[Origins]:
    """Origins that may fetch from /data/ of the server."""
    found = Origins(
        (), max_connections=4, redirect_guard=AllowList([AllowRule(server.url("/data/"))])
    )
    yield found
    await found.close()


async def size_of(origins: Origins, url: str) -> int:
    """Return the size of what a url leads to."""
    return (await origins.origin(url).stat(url)).size_bytes


def warmed(daemon: Daemon, url: str) -> list[dict[str, Any]]:
    """Ask a daemon to fetch a url; return what it tells."""
    return [
        json.loads(line)
        for line in daemon.request("POST", "/v1/warm", {"urls": [url]}).splitlines()
    ]


@pytest.fixture(scope="module")
def beset(tmp_path_factory: pytest.TempPathFactory) -> Iterator[access.Ground]:
    """The campaign's servers and daemon."""
    with access.ground(tmp_path_factory.mktemp("a"), QUICK) as ground:
        yield ground


@rows(access.ROWS)
def test_hostile_urls_reach_nothing(row: Row, beset: access.Ground) -> None:
    """The campaign's urls, redirects and indexes reach neither canary nor secret."""
    row.check(beset)


def test_the_canary_sings(tmp_path: Path, canary: Canary) -> None:
    """The campaign's proof of an attack does appear where the daemon may ask."""
    with Daemon(tmp_path) as daemon:
        assert warmed(daemon, canary.url("/data/a.tar"))[-1]["fetched"] == 1
    assert canary.connections
    assert canary.paths


def test_a_url_outside_is_refused_before_any_traffic(tmp_path: Path, canary: Canary) -> None:
    """Not a connection is made for a url, a pattern, an index or a prefix that no rule covers."""
    with Daemon(tmp_path, "--allow", "s3://bucket/", "--allow", "http://127.0.0.1/") as daemon:
        for path in ("/data/a.tar", "/data/{a,b}.tar", "/data/index.json", "/data/", "/data/*.tar"):
            (answer,) = warmed(daemon, canary.url(path))
            assert answer["error"]["code"] == "not_allowed"
            assert canary.url(path) in answer["error"]["url"]
    assert canary.connections == 0


@pytest.mark.parametrize("status", first_quick([301, 302, 303, 307, 308]))
async def test_a_redirect_outside_is_not_followed(
    status: int, server: Canary, canary: Canary, fenced: Origins
) -> None:
    """It is an error that names both ends, and the other server hears nothing of it."""
    server.redirects["/data/r.tar"] = status, canary.url("/data/a.tar")
    with pytest.raises(NotAllowedError) as refused:
        await size_of(fenced, server.url("/data/r.tar"))
    assert refused.value.url == server.url("/data/r.tar")
    assert canary.url("/data/a.tar") in refused.value.message
    assert canary.connections == 0


@pytest.mark.slow
async def test_redirects_in_a_circle_end(server: Canary, fenced: Origins) -> None:
    """A server cannot keep the daemon busy with itself."""
    server.redirects["/data/r.tar"] = 302, server.url("/data/r.tar")
    with pytest.raises(OriginError, match="redirects more than"):
        await size_of(fenced, server.url("/data/r.tar"))


async def test_credentials_do_not_follow_a_redirect_to_another_server(
    server: Canary, canary: Canary
) -> None:
    """The server that a table's headers are for gets them, and the one behind it gets none."""
    options = {
        "headers": {"X-Api-Key": "secret", "Authorization": "Bearer secret"},
        "client_kwargs": {"headers": {"X-Session": "secret"}, "cookies": {"session": "secret"}},
        "params": {"key": "secret"},
    }
    table = OriginTable.model_validate({"match": server.url("/"), "storage_options": options})
    origins = Origins([table], max_connections=4)
    server.redirects["/data/r.tar?key=secret"] = 302, canary.url("/data/a.tar", "localhost")
    assert await size_of(origins, server.url("/data/r.tar")) == len(DATA)
    assert sum("secret" in value for value in server.requests[0][2].values()) == 4
    assert "secret" in server.requests[0][1]
    assert not any(
        "secret" in value for value in (canary.requests[0][1], *canary.requests[0][2].values())
    )
    await origins.close()


async def test_a_name_that_leads_to_this_node_is_refused_by_default(
    canary: Canary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The addresses of the connection count, so a name that changes in between gains nothing."""
    lead(monkeypatch, "innocent.example", "127.0.0.1")
    origins = Origins((), max_connections=4, redirect_guard=AllowList([]))
    with pytest.raises(NotAllowedError, match=r"innocent\.example resolves to 127\.0\.0\.1"):
        await size_of(origins, canary.url("/data/a.tar", "innocent.example"))
    assert canary.connections == 0
    # Judged by its name before.
    assert await size_of(origins, canary.url("/data/a.tar", "localhost")) == len(DATA)
    await origins.close()


@pytest.mark.slow
async def test_s3_redirects_lead_nowhere_else(
    tmp_path: Path, server: Canary, canary: Canary
) -> None:
    """A 301 or 307 to another place is an error, and nobody else gets our signature."""
    credentials = {"key": "k", "secret": "s", "endpoint_url": server.url("")}
    table = OriginTable.model_validate(
        {"match": "s3://", "region": "eu-west-1", "storage_options": credentials}
    )
    for status in (301, 302, 307, 308):
        server.redirects["/bucket/a.tar"] = status, canary.url("/bucket/a.tar")
        server.redirects["/bucket?location"] = status, canary.url("/bucket")
        origins = Origins([table], max_connections=4, redirect_guard=AllowList([]))
        with pytest.raises(ShardcacheError):
            await size_of(origins, "s3://bucket/a.tar")
        await origins.close()
    assert server.connections
    assert canary.connections == 0


def test_an_index_file_opens_nothing(tmp_path: Path, server: Canary, canary: Canary) -> None:
    """Its entries are judged like urls of a request: one that leads outside is an error."""
    (tmp_path / "secret.tar").write_bytes(DATA)
    with Daemon(tmp_path, "--allow", server.url("/data/")) as daemon:
        for entry in (
            canary.url("/data/a.tar"),
            f"file://{tmp_path}/secret.tar",
            "../secret.tar",
            "/secret.tar",
        ):
            rows = [{"url": "a.tar"}, {"url": entry}]
            server.files["/data/index.json"] = json.dumps({"shardlist": rows}).encode()
            (answer,) = warmed(daemon, server.url("/data/index.json"))
            assert answer["error"]["code"] in ("not_allowed", "config"), entry
        assert daemon.shards() == []
    assert canary.connections == 0
    assert set(server.paths) == {"/data/index.json"}


@pytest.mark.slow
def test_a_link_leads_no_further_than_a_redirect(tmp_path: Path) -> None:
    """Symbolic links work within the allowed folder, while those out of it open nothing."""
    allowed = tmp_path / "allowed"
    outside = tmp_path / "outside"
    for folder in (allowed / "sub", outside):
        folder.mkdir(parents=True)
        (folder / "a.tar").write_bytes(DATA)
    (allowed / "in.tar").symlink_to(allowed / "sub" / "a.tar")
    (allowed / "out.tar").symlink_to(outside / "a.tar")
    (allowed / "out").symlink_to(outside)
    with Daemon(tmp_path, "--allow", f"file://{allowed}/") as daemon:
        assert warmed(daemon, f"file://{allowed}/in.tar")[-1]["fetched"] == 1
        for url in ("out.tar", "out/a.tar"):
            event = next(
                event
                for event in warmed(daemon, f"file://{allowed}/{url}")
                if event["event"] == "error"
            )
            assert event["error"]["code"] == "not_allowed"
        for url in ("out/", "out/*.tar"):
            (answer,) = warmed(daemon, f"file://{allowed}/{url}")
            assert answer["error"]["code"] == "not_allowed"
        assert [shard["url"] for shard in daemon.shards()] == [f"file://{allowed}/in.tar"]


PIECES = ("../", "/", "\\", "\0", ".", "%2f", "a", "é", "\n", "~", "$(x)", ".tar", "-")
NASTY = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
ROOT = Layout(Path("/cache"))


@given(st.one_of(NASTY, st.text()), st.one_of(NASTY, st.text()))
@pytest.mark.slow
def test_every_name_in_the_cache_is_made_of_hex_digits(url: str, version: str) -> None:
    """Urls and ETags have no influence on a shard's path but by their hash."""
    key = shard_key(
        url.encode(errors="replace").decode(), version.encode(errors="replace").decode()
    )
    assert is_key(key)
    paths = [
        ROOT.tar(key),
        ROOT.sidecar(key),
        *(ROOT.unpublished(key, end) for end in (PART, JOURNAL, TAR, SIDECAR)),
    ]
    assert all(path.parts[:2] == ("/", "cache") and ".." not in path.parts for path in paths)


def test_shards_have_names_of_their_own() -> None:
    """Not even where one's url ends as the other's version begins."""
    assert shard_key("s3://b/a", "b") != shard_key("s3://b/ab", "")


def hostile_tar(outside: Path) -> bytes:
    """Return a tar that would write all over the place, were it unpacked."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in (
            f"{outside}/absolute.bin",
            "../../../climb.bin",
            "a/../../b.bin",
            "c\x1b[2J.bin",
            "d\n.bin",
        ):
            member = tarfile.TarInfo(name)
            member.size = 4
            tar.addfile(member, io.BytesIO(b"data"))
        link = tarfile.TarInfo("link.bin")
        link.type = tarfile.SYMTYPE
        link.linkname = "/etc/passwd"
        tar.addfile(link)
        device = tarfile.TarInfo("device.bin")
        device.type = tarfile.CHRTYPE
        tar.addfile(device)
    return buffer.getvalue()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon in a folder of its own."""
    folder = tmp_path / "d"
    folder.mkdir()
    with Daemon(folder, "--attempts", "2") as running:
        yield running


def test_members_of_a_tar_are_data(tmp_path: Path, daemon: Daemon) -> None:
    """Absolute and climbing names are mere keys, links are no samples, nothing is unpacked."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "shard.tar").write_bytes(hostile_tar(outside))
    before = set(_outside(daemon, tmp_path))
    samples = list(
        ShardDataset(str(tmp_path / "shard.tar"), socket=daemon.socket, timeout_s=GUARD_S)
    )
    assert [sample["bin"] for sample in samples] == [b"data"] * 5
    assert set(_outside(daemon, tmp_path)) == before
    inside = [
        path for path in daemon.cache_dir.rglob("*") if path.is_symlink() or "climb" in path.name
    ]
    assert inside == []


def _outside(daemon: Daemon, folder: Path) -> Iterator[Path]:
    """Yield what lies in `folder`, except the daemon's own files, which come and go."""
    own = daemon.cache_dir.parent
    return (path for path in folder.rglob("*") if path != own and own not in path.parents)


@pytest.mark.parametrize(
    "name",
    first_quick(
        ['"../../../etag"', '"a\\b"', '"\x1b[2J"', '"\xff\x9b"', 'W/"weak"', '"' + "x" * 5000 + '"']
    ),
)
def test_a_version_is_a_name_and_nothing_else(name: str, daemon: Daemon) -> None:
    """Any ETag makes a shard of that version, or of none if it cannot be written."""
    with Canary() as server:
        server.etag = name
        server.files["/a.tar"] = make_tar(random_samples(2))
        dataset = ShardDataset(server.url("/a.tar"), socket=daemon.socket, timeout_s=GUARD_S)
        assert len(list(dataset)) == 2
    daemon.await_publication()
    (shard,) = daemon.shards()
    assert shard["version"] == (f"size={shard['size_bytes']}" if "\x1b" in name else name)
    assert all(path.stem.isalnum() for path in (daemon.cache_dir / "shards").rglob("*.tar"))


@pytest.mark.slow
def test_the_command_line_shows_names_and_obeys_none(tmp_path: Path, daemon: Daemon) -> None:
    """Markup in a url and a terminal's commands in any name or message have no effect."""
    (tmp_path / "[red]a[link=x].tar").write_bytes(make_tar(random_samples(2)))
    daemon.request("POST", "/v1/warm", {"urls": [f"{tmp_path}/*.tar"]})
    with RawSession(daemon, job="\x1b]0;owned\x07\x1b[2J\u202e[red]job"):
        shown = (
            shardcache("status", socket=daemon.socket).out
            + shardcache("ls", socket=daemon.socket).out
        )
    assert "[red]a[link=x].tar" in shown
    assert "[red]job" in shown
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "\u202e" not in shown
    with Canary() as server:
        server.words = b"gone\x1b[2J \x9b2J\r\n"
        ran = shardcache("warm", server.url("/a.tar"), socket=daemon.socket)
    assert ran.code == 1
    assert "gone" in ran.out + ran.err
    assert "\x1b" not in ran.out + ran.err
    assert "\x9b" not in ran.out + ran.err
