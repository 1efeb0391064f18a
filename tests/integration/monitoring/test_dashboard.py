"""Files of the daemon's page, and the events it gets while it is open."""

import http.client
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import requests

from shardcache.server import api
from support.monitoring.dashboard import LIVE_PATH, Page, events_of, live
from support.network.ports import free_port
from support.programs.daemon import Daemon
from support.programs.guard import GUARD_S
from support.programs.raw_session import RawSession
from support.shards.tars import write_shards

TOKEN = "0123456789abcdef0123456789abcdef"
PART_BYTES = 64 * 1024
STATIC = Path(api.__file__).with_name("page")


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [f"file://{path}" for path in write_shards(tmp_path_factory.mktemp("data"), 4, 5)]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, port: int) -> Iterator[Daemon]:
    """A daemon that shows its page at a port."""
    with Daemon(tmp_path_factory.mktemp("d"), "--http", f"127.0.0.1:{port}") as running:
        yield running


def get(port: int, path: str, **headers: str) -> requests.Response:
    return requests.get(
        f"http://127.0.0.1:{port}{path}", headers=headers, timeout=GUARD_S, stream=True
    )


def test_the_page_brings_all_it_needs(daemon: Daemon, port: int) -> None:
    """Its files exist, have the right type and are cached. Nothing comes from elsewhere."""
    page = get(port, "/")
    named = re.findall(r'(?:href|src)="([^"#]+)"', page.text)
    kinds = {
        name: get(port, f"/{name}").headers["Content-Type"].partition(";")[0] for name in named
    }
    assert {kind for name, kind in kinds.items() if name.endswith(".js")} == {"text/javascript"}
    assert len(kinds) >= 4
    assert "default-src 'self'" in page.headers["Content-Security-Policy"]
    assert page.headers["Cache-Control"] == "no-cache"
    assert not re.search(r"<style|style=|<script>|\son\w+=", page.text)
    assert get(port, "/", **{"If-None-Match": page.headers["ETag"]}).status_code == 304
    script = get(port, f"/{next(name for name in named if name.endswith('.js'))}")
    assert "immutable" in script.headers["Cache-Control"]


def test_every_colour_of_the_page_has_a_value() -> None:
    """A colour without one draws nothing, so the light theme has all that the page uses."""
    texts = {path.name: path.read_text() for path in STATIC.iterdir()}
    used = re.findall(r"""(?:var\(|["'`])(--[a-z0-9-]+)[)"'`]""", "\n".join(texts.values()))
    light, dark = (
        {*re.findall(r"(--[a-z0-9-]+):", theme)}
        for theme in re.findall(r":root {(.*?)}", texts["style.css"], re.S)
    )
    assert len(used) > 40
    assert set(used) <= light
    assert dark <= light


@pytest.mark.parametrize(
    "path", ["/dashboard/static/0/main.js", "/dashboard/static/VERSION/nothing.js", "/dashboard/"]
)
def test_unknown_files_are_not_found(daemon: Daemon, port: int, path: str) -> None:
    """Another version's files, and files that there never were."""
    version = re.findall(r"dashboard/static/(\w+)/", get(port, "/").text)[0]
    assert get(port, path.replace("VERSION", version)).status_code in (403, 404)


def test_upcoming_shards_are_shown_by_time_and_presence(daemon: Daemon, urls: list[str]) -> None:
    """A job's lane counts its plan by presence, and names among the gaps what cannot come."""
    daemon.request("POST", "/v1/warm", {"urls": urls})
    missing = urls[0].replace("000000", "999999")
    with live(daemon) as events, RawSession(daemon, "ahead") as reader:
        page = Page(events)
        reader.plan([*urls, missing], [0, 1, 2, 3, 4])
        page.until(lambda: [gap["presence"] for gap in page.moment["gaps"]] == ["failed"])
        lane = page.lanes["ahead"]
        assert {name: sum(counts) for name, counts in lane["counts"].items()} == {
            "cached": 4,
            "fetching": 0,
            "missing": 0,
            "failed": 1,
        }
        assert [use["url"] for use in lane["soonest"]] == [*urls, missing]
        (gap,) = page.moment["gaps"]
        assert gap["url"] == missing
        assert gap["job"] == "ahead"
        assert 0 < gap["in_s"] < 60


def test_forbidden_urls_are_not_on_the_page(daemon: Daemon, port: int, urls: list[str]) -> None:
    """By TCP without a token anybody who can log in may look: local files are not named."""
    daemon.request("POST", "/v1/warm", {"urls": urls})
    with RawSession(daemon, "secret") as reader, get(port, LIVE_PATH) as answer:
        reader.plan([*urls, urls[0].replace("000000", "888888")], [0, 1, 4])
        page = Page(events_of(answer.raw))
        page.until(lambda: bool(page.moment["gaps"]))
        assert "file://" not in str(
            [page.moment["gaps"], page.moment["lanes"], page.moment["waits"]]
        )


def test_many_pages_cost_one_look(daemon: Daemon) -> None:
    """Eight pages that are opened together get the same snapshots."""
    with ExitStack() as streams:
        pages = [Page(streams.enter_context(live(daemon))) for _ in range(8)]
        for page in pages:
            page.hear()
    assert len({page.moment["uptime_s"] for page in pages}) <= 4, (
        "each page had a refresh of its own"
    )


def test_contents_need_the_token(tmp_path: Path) -> None:
    """A browser opens a page without headers, so only its contents require the token."""
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    port = free_port()
    with Daemon(tmp_path, "--http", f"127.0.0.1:{port}", "--http-token-file", str(token_file)):
        assert get(port, "/").status_code == 200
        assert get(port, LIVE_PATH).status_code == 401
        assert get(port, f"{LIVE_PATH}?token={TOKEN}").status_code == 401, "logs keep addresses"
        with get(port, LIVE_PATH, Authorization=f"Bearer {TOKEN}") as answer:
            Page(events_of(answer.raw)).hear()


@pytest.mark.slow
def test_a_stopping_daemon_ends_the_streams(tmp_path: Path) -> None:
    """It does not wait for pages, and says nothing of it in its log."""
    daemon = Daemon(tmp_path)
    daemon.start()
    with live(daemon) as events:
        Page(events).hear()
        assert daemon.stop() == 0
        with pytest.raises((OSError, http.client.HTTPException)):
            Page(events).until(lambda: False)
    assert "Traceback" not in daemon.tail(100)
