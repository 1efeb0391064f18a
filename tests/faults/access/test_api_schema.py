"""The admin API is what its description says, whatever it is sent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import ModuleType

import pytest

from fuzz.api_schema import document
from shardcache.server.api import routes
from support.network.unix_http import BASE_URL, session
from support.programs.daemon import Daemon
from support.shards.tars import write_shards

EXAMPLES = 8


@pytest.fixture(scope="module")
def api() -> ModuleType:
    """`fuzz.api`; every process of pytest imports this module, and schemathesis takes most of a second."""
    from fuzz import api

    return api


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
    described = {(method.upper(), path) for path, methods in document()["paths"].items() for method in methods}
    assert described == {(route.method, route.path) for route in routes}  # type: ignore[attr-defined]


@pytest.mark.slow
def test_every_operation_keeps_to_its_description(api: ModuleType, daemon: Daemon) -> None:
    """Sound data are taken, unsound data refused; statuses, media types and bodies are the described ones."""
    called = {operation.label: list(api.examine(daemon, operation, EXAMPLES)) for operation in api.operations()}
    assert len(called) == len(list(routes))
    for label, statuses in called.items():
        assert 200 in statuses or 403 in statuses, f"{label} was never really called"
    assert "Traceback" not in daemon.log.read_text()


def test_answers_about_real_shards_fit_the_description(api: ModuleType, daemon: Daemon) -> None:
    """Every event of a fetch, a count, a check and a removal; what random urls never come to."""
    cached = [json.loads(line)["url"] for line in daemon.request("GET", "/v1/shards").splitlines()]
    missing = cached[0].replace("000000", "999999")
    urls = {"urls": [*cached, missing]}
    bodies = {"/v1/index": urls, "/v1/verify": {"prefix": ""}, "/v1/evict": urls, "/v1/warm": urls}
    operations = {operation.path: operation for operation in api.operations()}
    with session(daemon.socket) as http:
        for path, body in bodies.items():
            answer = operations[path].Case(body=body).call_and_validate(base_url=BASE_URL, session=http)
            assert answer.status_code == 200, path
        answer = (
            operations["/v1/shards"]
            .Case(query={"prefix": cached[0]})
            .call_and_validate(base_url=BASE_URL, session=http)
        )
        assert len(answer.content.splitlines()) == 1


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/v1/nothing", None, 404),
        ("GET", "/v1/warm", None, 405),
        ("DELETE", "/v1/shards", None, 405),
        ("POST", "/v1/evict", b"{", 400),
        ("POST", "/v1/evict", b"\xff\xfe", 400),
        ("POST", "/v1/evict", b"[" * 100_000, 400),
        ("POST", "/v1/evict", b'"urls"', 400),
        ("POST", "/v1/verify", b'{"prefix": "\\ud800"}', 400),
        ("POST", "/v1/warm", b'{"urls": []}', 404),
        ("POST", "/v1/warm", b" " * (1 << 21), 413),
    ],
)
def test_http_errors_have_the_form_of_all_errors(
    daemon: Daemon, method: str, path: str, body: bytes | None, status: int
) -> None:
    """No page of HTML, no bare text: tools read one form of error; the methods that are known are named."""
    with session(daemon.socket) as http:
        headers = {"Content-Type": "text/plain; charset=no-such-thing"}
        answer = http.request(method, BASE_URL + path, data=body, headers=headers)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]
    assert (status == 405) == ("Allow" in answer.headers)
