"""Parts in hand: nginx's workers fetch each once, and what a worker leaves behind ends with it."""

import http.client
import http.server
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from http.client import HTTPException
from pathlib import Path

import pytest

from support.cluster.tier_nodes import TierNodes, needs_nginx
from support.network.http_requests import Answer
from support.programs.daemon import eventually
from support.programs.guard import GUARD_S
from support.programs.processes import children, wait_until_ended

pytestmark = needs_nginx

BODY = b"part" * 25
PART = {"Range": "bytes=0-99", "If-Match": '"any"'}
QUESTION = {**PART, "X-Shardcache-Owner": "alive"}
CLIENTS = 8
"""More than the failures after which an owner is left out."""
STALL_TIMEOUT_S = 5.0
"""A worker that does not show itself is gone after a fifth of it."""


class Store(http.server.ThreadingHTTPServer):
    """A store that answers the first part once released, and permissions once permitted."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.parts = 0  # requests for parts
        self.permissions = 0  # requests for a single byte
        self.released = threading.Event()
        self.permitted = threading.Event()
        self.permitted.set()
        self.counting = threading.Lock()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Store

    def do_GET(self) -> None:
        """Answer a range."""
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        if last > 0:
            with self.server.counting:
                self.server.parts += 1
                is_first = self.server.parts == 1
            if is_first:
                self.server.released.wait()
        else:
            self.server.permissions += 1
            self.server.permitted.wait()
        with suppress(OSError):  # whoever asked was killed
            self.send_response(206)
            self.send_header("ETag", '"any"')
            self.send_header("Content-Range", f"bytes {first}-{last}/100")
            self.send_header("Content-Length", str(last + 1 - first))
            self.end_headers()
            self.wfile.write(BODY[first : last + 1])

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Log nothing."""


@pytest.fixture
def store() -> Iterator[Store]:
    """A store that holds back its first answer."""
    with Store() as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.released.set()
        server.permitted.set()
        server.shutdown()


@pytest.fixture
def nodes(store: Store) -> Iterator[TierNodes]:
    """One node, whose nginx has one worker."""
    with TierNodes([store.url], 1, stall_timeout_s=STALL_TIMEOUT_S) as running:
        yield running


def get(nodes: TierNodes, store: Store, headers: dict[str, str], node: int = 0) -> Answer:
    """Ask a node's front for the part, or about it."""
    return nodes.get(nodes.front(nodes.tier.nodes[node]), f"{store.url}/a.tar?", headers)


def worker_of(nodes: TierNodes, node: int = 0) -> int:
    """Return the process that is the node's worker: its first child."""
    return children(nodes.nginx[nodes.tier.nodes[node].name].pid)[0]


def owner_of(nodes: TierNodes, store: Store) -> int:
    """Return the place of the part's owner among the nodes."""
    address = get(nodes, store, {**PART, "X-Shardcache-Owner": "name"}).headers[
        "x-shardcache-owner"
    ]
    addresses = [node.at(nodes.tier.owner_port) for node in nodes.tier.nodes]
    return addresses.index(address)


class Client(http.client.HTTPConnection):
    """A connection to a front that stays open between requests for the part."""

    def __init__(self, front: str, store: Store) -> None:
        super().__init__("front", timeout=GUARD_S)
        self._headers = {**PART, "Host": store.url.removeprefix("http://")}
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(GUARD_S)
        self.sock.connect(front)

    def ask(self) -> None:
        """Send a request."""
        super().request("GET", "/a.tar?", headers=self._headers)

    def body(self) -> bytes:
        """Return the body of its answer."""
        return self.getresponse().read()


def test_waiters_get_a_part_that_is_fetched_once(nodes: TierNodes, store: Store) -> None:
    """All of those who ask for it while it is fetched."""
    with ThreadPoolExecutor(10) as threads:
        answers = [threads.submit(get, nodes, store, PART) for _ in range(10)]
        eventually(lambda: store.parts == 1)
        store.released.set()
        assert [answer.result().body for answer in answers] == [BODY] * 10
    assert store.parts == 1


@pytest.mark.slow
def test_a_killed_workers_lock_ends_with_it(nodes: TierNodes, store: Store) -> None:
    """The next to ask gets the part from a store that never answered the killed worker."""
    worker = worker_of(nodes)
    with ThreadPoolExecutor(1) as threads:
        lost = threads.submit(get, nodes, store, PART)
        eventually(lambda: store.parts == 1)
        os.kill(worker, signal.SIGKILL)
        wait_until_ended(worker)
        with pytest.raises((OSError, HTTPException)):
            lost.result()
    eventually(lambda: worker_of(nodes) != worker)
    assert get(nodes, store, PART).body == BODY
    assert store.parts == 2


def test_the_owner_tells_whether_a_part_is_in_hand(nodes: TierNodes, store: Store) -> None:
    """While it is fetched; not before, and not afterwards."""
    assert get(nodes, store, QUESTION).status == 404
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(get, nodes, store, PART)
        eventually(lambda: store.parts == 1)
        assert get(nodes, store, QUESTION).status == 204
        store.released.set()
        assert answer.result().body == BODY
    eventually(lambda: get(nodes, store, QUESTION).status == 404)


def test_a_request_is_not_in_hand_before_it_is_permitted(nodes: TierNodes, store: Store) -> None:
    """The node asked for permission may be dead, so the request goes to another one."""
    store.permitted.clear()
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(get, nodes, store, PART)
        eventually(lambda: store.permissions == 1)
        assert get(nodes, store, QUESTION).status == 404
        store.permitted.set()
        eventually(lambda: get(nodes, store, QUESTION).status == 204)
        store.released.set()
        assert answer.result().body == BODY


def test_the_owner_tells_each_node_about_its_own_request(store: Store) -> None:
    """Another node's request says nothing about one lost on its way or with a dead owner."""
    with (
        TierNodes([store.url], 2, stall_timeout_s=STALL_TIMEOUT_S) as nodes,
        ThreadPoolExecutor(1) as threads,
    ):
        answer = threads.submit(get, nodes, store, PART)
        eventually(lambda: store.parts == 1)
        assert get(nodes, store, QUESTION, node=0).status == 204
        assert get(nodes, store, QUESTION, node=1).status == 404
        store.released.set()
        assert answer.result().body == BODY


def test_the_owner_has_the_requests_of_all_who_wait(store: Store) -> None:
    """Not only that of the node for which it fetches the part."""
    with (
        TierNodes([store.url], 2, stall_timeout_s=STALL_TIMEOUT_S) as nodes,
        ThreadPoolExecutor(2) as threads,
    ):
        answers = [threads.submit(get, nodes, store, PART, node) for node in range(2)]
        for node in range(2):
            eventually(lambda node=node: get(nodes, store, QUESTION, node).status == 204)
        store.released.set()
        assert [answer.result().body for answer in answers] == [BODY] * 2
    assert store.parts == 1


@pytest.mark.slow
def test_a_killed_workers_part_is_not_in_hand(nodes: TierNodes, store: Store) -> None:
    """The node answers for it, by its next worker, and does not claim that it fetches the part."""
    worker = worker_of(nodes)
    with ThreadPoolExecutor(1) as threads:
        lost = threads.submit(get, nodes, store, PART)
        eventually(lambda: store.parts == 1)
        os.kill(worker, signal.SIGKILL)
        wait_until_ended(worker)
        assert lost.exception() is not None
    eventually(lambda: worker_of(nodes) != worker)
    eventually(lambda: get(nodes, store, QUESTION).status == 404)


@pytest.mark.slow
def test_connections_that_a_reload_closes_cost_no_second_fetch(store: Store) -> None:
    """An owner's old worker closes idle connections, and the front asks the owner again."""
    with TierNodes([store.url], 2, stall_timeout_s=STALL_TIMEOUT_S) as nodes, ExitStack() as stack:
        owner = owner_of(nodes, store)
        front = nodes.front(nodes.tier.nodes[1 - owner])
        clients = [stack.enter_context(closing(Client(front, store))) for _ in range(CLIENTS)]
        for client in clients:
            client.ask()
        eventually(lambda: store.parts == 1)
        store.released.set()
        assert [client.body() for client in clients] == [BODY] * CLIENTS

        asking = worker_of(nodes, 1 - owner)
        previous = worker_of(nodes, owner)
        os.kill(asking, signal.SIGSTOP)
        try:
            for client in clients:
                client.ask()
            os.kill(nodes.nginx[nodes.tier.nodes[owner].name].pid, signal.SIGHUP)
            wait_until_ended(previous)
        finally:
            os.kill(asking, signal.SIGCONT)

        assert [client.body() for client in clients] == [BODY] * CLIENTS
    assert store.parts == 1


def test_cached_parts_are_read_in_threads(nodes: TierNodes) -> None:
    """A worker does not wait for the disk: other requests go on while one read hangs."""
    eventually(lambda: len(list(Path(f"/proc/{worker_of(nodes)}/task").iterdir())) > 1)
