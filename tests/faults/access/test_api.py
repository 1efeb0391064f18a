"""The admin API answers in its shapes, whatever it is sent."""

import json
from collections.abc import Iterator

import pytest

from campaign.api import FAILURE, OPERATIONS, ask, check, examine
from shardcache.server.api import routes
from support.programs.daemon import Daemon
from support.shards.tars import write_shards


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with a shard or two, that may fetch nothing from elsewhere."""
    root = tmp_path_factory.mktemp("d")
    urls = [f"file://{path}" for path in write_shards(root, 2, 3)]
    with Daemon(root, "--allow", f"file://{root}/") as running:
        running.request("POST", "/v1/warm", {"urls": urls})
        yield running


def test_every_route_is_described_and_nothing_else() -> None:
    """A route without a description, or a description without a route, would be noticed here."""
    assert set(OPERATIONS) == {(route.method, route.path) for route in routes}  # type: ignore[attr-defined]


@pytest.mark.parametrize("key", OPERATIONS, ids=" ".join)
def test_every_operation_keeps_to_its_description(daemon: Daemon, key: tuple[str, str]) -> None:
    """Sound data are taken, unsound data refused; statuses and bodies are the described ones."""
    statuses = list(examine(daemon, key, 8))
    assert 200 in statuses or 403 in statuses, "it was never really called"
    assert "Traceback" not in daemon.log.read_text()


def test_answers_about_real_shards_fit_the_description(daemon: Daemon) -> None:
    """Every event of a fetch, a count, a check and a removal; what random urls never come to."""
    cached = [shard["url"] for shard in daemon.shards()]
    urls = {"urls": [*cached, cached[0].replace("000000", "999999")]}
    for path in ("/v1/index", "/v1/pin", "/v1/unpin", "/v1/evict", "/v1/warm"):
        assert ask(daemon, ("POST", path), urls) == 200, path
    assert ask(daemon, ("POST", "/v1/verify"), {"prefix": ""}) == 200
    assert len(daemon.request("GET", f"/v1/shards?prefix={cached[0]}").splitlines()) == 1


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/v1/nothing", None, 404),
        ("GET", "/v1/warm", None, 405),
        ("DELETE", "/v1/shards", None, 405),
        ("POST", "/v1/evict", b"{", 400),
        ("POST", "/v1/evict", b"\xff\xfe", 400),
        ("POST", "/v1/evict", b"[" * 100_000, 400),
        ("POST", "/v1/verify", b'{"prefix": "\\ud800"}', 400),
        ("POST", "/v1/warm", b'{"urls": []}', 404),
        ("POST", "/v1/warm", b" " * (1 << 21), 413),
    ],
)
def test_http_errors_have_the_form_of_all_errors(
    daemon: Daemon, method: str, path: str, body: bytes | None, status: int
) -> None:
    """No page of HTML, no bare text: tools read one form of error."""
    found, text = daemon.answer(method, path, body)
    assert found == status
    check(json.loads(text), FAILURE)
