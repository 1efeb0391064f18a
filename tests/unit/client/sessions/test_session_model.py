"""session.py against a model: a reader holds just the shards it asked for, come what may."""

import json
import random
import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager
from enum import Enum, auto
from http import HTTPStatus
from itertools import count
from pathlib import Path

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, unix_serve

from shardcache.errors import NotFoundError, StoppingError
from shardcache.shared.protocol import Json, ShardRef, parse
from shardcache_client.daemon.choice import DaemonChoice
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.lease import LeaseRequest
from shardcache_client.daemon.patience import Patience
from shardcache_client.daemon.session import Session
from shardcache_client.order.shards.declared_plan import Plan
from shardcache_client.order.shards.manifest import Manifest
from support.network.peer import WELCOME
from support.programs.daemon import eventually
from support.programs.guard import GUARD_S

SHARDS = [ShardRef(f"s3://bucket/{number}.tar") for number in range(4)]
MANIFEST = Manifest.of(SHARDS)
GOING_AWAY = 1001


class Fault(Enum):
    """Fault of a daemon with one message."""

    NONE = auto()
    LATE = auto()  # it grants no shard until it is asked what it waits for, then the last one first
    BREAK = auto()  # it breaks the connection
    LEAVE = auto()  # it says that it is stopping, and comes back at once
    # It breaks the connection, accepts none for two tries, and knows no shards any more.
    RESTART = auto()
    LOSE = auto()  # it cannot fetch the shard, and says so once the shard is needed


class FlakyDaemon:
    """A daemon that keeps a reader's plan and leases really, except for given faults.

    Attributes:
        faults: one for each message to come; there are none when these are used up.
        known: fingerprints of the lists of shards that it was sent.
        numbers: of its connections.
        session: plan and leases of its present connection.
    """

    def __init__(self) -> None:
        self.faults: deque[Fault] = deque()
        self.known: set[str] = set()
        self.numbers = count()
        self.session = FlakySession(self)
        self._refusals: deque[HTTPStatus | None] = deque()

    def restart(self) -> None:
        self.known.clear()
        self._refusals.extend((None, HTTPStatus.SERVICE_UNAVAILABLE))

    def admit(self, connection: ServerConnection, _request: Request) -> Response | None:
        """Let a connection in, or break it, or answer that the daemon is stopping."""
        if not self._refusals:
            return None
        status = self._refusals.popleft()
        if status is None:
            connection.socket.shutdown(socket.SHUT_RDWR)
            return None
        error = StoppingError("the daemon is stopping")
        return connection.respond(status, json.dumps({"error": error.to_json()}))

    def serve(self, connection: ServerConnection) -> None:
        """Answer one connection to its end, or until a fault ends it."""
        session = FlakySession(self)
        self.session = session
        try:
            self._answer(connection, session)
        except ConnectionClosed:
            session.leases.clear()

    def _answer(self, connection: ServerConnection, session: "FlakySession") -> None:
        while True:
            message = parse(connection.recv())
            fault = self.faults.popleft() if self.faults else Fault.NONE
            match fault:
                case Fault.LEAVE:
                    connection.close(GOING_AWAY)
                case Fault.BREAK:
                    connection.socket.shutdown(socket.SHUT_RDWR)
                case Fault.RESTART:
                    self.restart()
                    connection.socket.shutdown(socket.SHUT_RDWR)
                case _:
                    for answer in session.hear(message, fault):
                        connection.send(json.dumps(answer))


class FlakySession:
    """One connection's plan and leases.

    Attributes:
        order: numbers of the planned shards, as far as they were sent.
        reads: how many of them, sent or not, belong to this epoch.
        leases: urls of the leased shards, by the numbers of the leases.
        needed: numbers of the leases whose shards the reader has reached.
        path: of every shard that is granted, another one on each connection.
    """

    def __init__(self, daemon: FlakyDaemon) -> None:
        self.order: list[int] = []
        self.reads = 0
        self.leases: dict[int, str] = {}
        self.needed: set[int] = set()
        self.path = f"/nowhere/{next(daemon.numbers)}"
        self._daemon = daemon
        self._lost: set[int] = set()
        self._is_late = False
        self._late: list[Json] = []

    def held(self) -> list[tuple[str, bool]]:
        """Return the url of each lease, and whether its shard is needed."""
        return sorted((url, number in self.needed) for number, url in list(self.leases.items()))

    def hear(self, message: Json, fault: Fault) -> list[Json]:
        """Handle a message; return the answers that are due now."""
        kind = message["type"]
        self._is_late = self._is_late or fault is Fault.LATE
        if kind == "lease" and fault is Fault.LOSE:
            self._lost.add(message["id"])
        answer = self._answer(message)
        answers = [] if answer is None else [{"id": message.get("id"), **answer}]
        if kind in ("lease", "more") and self._is_late:
            self._late += answers
            return []
        if kind == "explain":
            answers += reversed(self._late)
            self._is_late = False
            self._late = []
        return answers

    def _answer(self, message: Json) -> Json | None:
        match message["type"]:
            case "hello":
                return WELCOME
            case "shards":
                return self._learn(message)
            case "plan" | "extend":
                return self._plan(message)
            case "lease":
                return self._lease(message)
            case "more":
                return self._granted(message["lease"], "leased")
            case "explain":
                return {"type": "waiting", "of": message["of"], "reason": "downloading"}
            case "need":
                return self._need(message["of"])
            case "release":
                self.leases.pop(message["lease"], None)
                self.needed.discard(message["lease"])
        return None

    def _learn(self, message: Json) -> Json:
        if "packed" in message:
            self._daemon.known.add(message["fingerprint"])
        is_known = message["fingerprint"] in self._daemon.known
        return {"type": "ok" if is_known else "unknown"}

    def _plan(self, message: Json) -> Json:
        if message["type"] == "plan":
            if not self._daemon.known.issuperset(message["shards"]):
                return {"type": "unknown"}
            self.order = []
            self.reads = message["reads"]
        self.order += message["order"]
        return {"type": "ok"}

    def _lease(self, message: Json) -> Json | None:
        lease = message["id"]
        self.leases[lease] = SHARDS[self.order[message["position"]]].url
        if lease in self._lost:
            return None
        return self._granted(lease, "arriving" if message["partial"] else "leased")

    def _need(self, lease: int) -> Json | None:
        if lease not in self.leases:
            return None
        if lease not in self._lost:
            self.needed.add(lease)
            return None
        error = NotFoundError("no such object", url=self.leases.pop(lease))
        return {"type": "error", "id": lease, "error": error.to_json()}

    def _granted(self, lease: int, kind: str) -> Json:
        place: Json = {
            "url": self.leases[lease],
            "version": "v1",
            "path": self.path,
            "size_bytes": 10_240,
        }
        if kind == "arriving":
            state: Json = {"inode": 0, "ready_bytes": 512}
        else:
            state = {"index_path": "/nowhere.idx", "samples": 1}
        return {"type": kind, "lease": lease, **place, **state}


@contextmanager
def flaky_daemon(path: Path) -> Iterator[FlakyDaemon]:
    """Serve at a socket."""
    daemon = FlakyDaemon()
    with unix_serve(
        daemon.serve, str(path), process_request=daemon.admit, close_timeout=0.1
    ) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield daemon
        finally:
            server.shutdown()
            thread.join()


class Reader:
    """A reader that does what readers do, in any order, while its daemon has any faults.

    Attributes:
        leases: the model: what it has asked for and not given back, and whether it has waited for
            that.
    """

    def __init__(self, session: Session, daemon: FlakyDaemon, rng: random.Random) -> None:
        self.leases: dict[LeaseRequest, bool] = {}
        self._session = session
        self._daemon = daemon
        self._rng = rng
        self._plan = Plan.of(MANIFEST, 0, [])
        self._position = 0
        self.begin_an_epoch()

    def step(self) -> None:
        """Do one thing; sometimes, the daemon has trouble with one of the next messages."""
        if self._rng.random() < 0.3:
            self._daemon.faults.extend([Fault.NONE] * self._rng.randrange(5))
            self._daemon.faults.append(self._rng.choice(list(Fault)))
        steps = [
            self.ask,
            self.ask,
            self.wait,
            self.wait,
            self.read_on,
            self.give_back,
            self.give_back,
        ]
        self._rng.choice([*steps, self._session.extend, self.begin_an_epoch])()

    def begin_an_epoch(self) -> None:
        """Declare the next plan; one of thousands of shards is sent in pieces."""
        while self.leases:
            self.give_back()
        order = self._rng.sample(range(len(SHARDS)), len(SHARDS))
        self._plan = Plan.of(MANIFEST, 0, order * self._rng.choice([1, 3, 1_000]))
        self._position = 0
        self._session.declare(self._plan)

    def ask(self) -> None:
        if self._position < self._plan.reads:
            is_partial = self._rng.random() < 0.5
            self.leases[self._session.lease(self._position, partial=is_partial)] = False
            self._position += 1

    def wait(self) -> None:
        if self.leases:
            self.take(self._rng.choice(list(self.leases)))

    def take(self, lease: LeaseRequest) -> None:
        """Wait for a shard: it is that of the plan, or the daemon could not fetch it."""
        url = self._plan.shard(lease.position).url
        try:
            grant = self._session.wait(lease)
        except NotFoundError as exn:
            assert exn.url == url
            del self.leases[lease]
        else:
            assert grant["url"] == url
            self.leases[lease] = True

    def read_on(self) -> None:
        """Wait for the rest of a shard; where the connection breaks, wait for the shard again."""
        arriving = [
            lease
            for lease in self.leases
            if lease.grant is not None and lease.grant["type"] == "arriving"
        ]
        if arriving:
            lease = self._rng.choice(arriving)
            grant = self._session.more(lease, beyond=512)
            if grant is None:
                self.take(lease)
            else:
                assert grant["url"] == self._plan.shard(lease.position).url

    def give_back(self) -> None:
        if self.leases:
            lease = self._rng.choice(list(self.leases))
            self._session.release(lease, unreadable=self._rng.random() >= 0.5)
            del self.leases[lease]

    def check(self) -> None:
        """Check that reader and daemon know the same leases and plan after recovery."""
        self._daemon.faults.clear()
        if self._position == self._plan.reads:
            self.begin_an_epoch()
        self.ask()
        self.take(list(self.leases)[-1])
        for lease, is_needed in list(self.leases.items()):
            if is_needed:
                self.take(lease)
        model = sorted(
            (self._plan.shard(lease.position).url, is_needed)
            for lease, is_needed in self.leases.items()
        )
        eventually(lambda: self._daemon.session.held() == model)
        sent = self._daemon.session
        for lease, is_needed in self.leases.items():
            if is_needed:
                assert lease.grant is not None
                assert lease.grant["path"] == sent.path
        assert sent.order == list(self._plan.order[-sent.reads :])[: len(sent.order)]


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 50))]
)
def test_reader_holds_the_shards_that_it_asked_for(seed: int, tmp_path: Path) -> None:
    """Any requests, waits and releases keep this true through all of the daemon's faults."""
    path = tmp_path / "s.sock"
    # The reason of a wait is asked for soon, and with it come the answers that are late.
    patience = Patience(GUARD_S, first_report_s=0.01, next_report_s=0.01)
    with (
        flaky_daemon(path) as daemon,
        closing(Session(DaemonChoice(path), ReaderIdentity("job"), patience)) as session,
    ):
        reader = Reader(session, daemon, random.Random(seed))
        for _ in range(10):
            for _ in range(10):
                reader.step()
            reader.check()
