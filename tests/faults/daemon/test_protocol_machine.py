"""A session in any order of sound and unsound requests, against a model that knows which leases there are."""

from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from support.programs.daemon import Daemon, eventually
from support.programs.raw_session import RawSession
from support.shards.tars import write_shards

SHARDS = 3

orders = st.lists(st.integers(0, SHARDS - 1), max_size=4)
numbers = st.integers(0, 12)
nonsense: st.SearchStrategy[Any] = st.sampled_from([None, -1, 2**63, 1.5, "1", [], {}, True])


class Machine(RuleBasedStateMachine):
    """One reader. `hands` has for each lease that was granted its shard, and whether it is needed."""

    daemon: ClassVar[Daemon]
    urls: ClassVar[list[str]]

    def __init__(self) -> None:
        super().__init__()
        self.session = RawSession(self.daemon, job="machine")
        self.course: list[int] | None = None
        self.shard_window: dict[int, tuple[str, bool]] = {}
        self.requests = 0

    def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Send a request with an id that was not used before; return its answer."""
        self.requests += 1
        self.session.send(type=kind, id=self.requests, **fields)
        answer = self.session.receive()
        assert answer["id"] == self.requests
        return answer

    @rule(order=orders)
    def plan(self, order: list[int]) -> None:
        """A plan is taken at any time; what was granted under another stays in hand."""
        shards = [[url, None, None, None] for url in self.urls]
        assert self.ask("plan", epoch=0, shards=shards, order=order, reads=len(order))["type"] == "ok"
        self.course = list(order)

    @rule(order=orders)
    def extend(self, order: list[int]) -> None:
        """A plan is made longer, if there is one."""
        answer = self.ask("extend", shards=[], order=order)
        if self.course is None:
            assert answer["error"]["code"] == "protocol"
        else:
            assert answer["type"] == "ok"
            self.course += order

    @rule(position=numbers)
    def lease(self, position: int) -> None:
        """The plan's shard at a position is granted; a position beyond the plan is refused."""
        answer = self.ask("lease", position=position)
        if position < len(self.course or ()):
            assert self.course is not None
            url = self.urls[self.course[position]]
            assert (answer["type"], answer["url"]) == ("leased", url)
            self.shard_window[answer["lease"]] = (url, False)
        else:
            assert answer["error"]["code"] == "protocol"

    @rule(number=numbers)
    def lease_again(self, number: int) -> None:
        """An id that has a lease already gets no other."""
        if number in self.shard_window and self.course:
            self.session.send(type="lease", id=number, position=0)
            assert self.session.receive()["error"]["code"] == "protocol"

    @rule(number=numbers)
    def need(self, number: int) -> None:
        """A lease that there is comes into the reader's hands; of any other nothing is said."""
        self.session.send(type="need", of=number)
        if number in self.shard_window:
            self.shard_window[number] = (self.shard_window[number][0], True)

    @rule(number=numbers, read=st.booleans())
    def release(self, number: int, read: bool) -> None:
        """A lease ends once; to end it again says nothing."""
        self.session.send(type="release", lease=number, read=read)
        self.shard_window.pop(number, None)

    @rule(kind=st.sampled_from(["plan", "extend", "lease", "more", "explain", "resolve", "dance"]), value=nonsense)
    def talk_nonsense(self, kind: str, value: Any) -> None:
        """A request of wrong types is refused and changes nothing."""
        if kind == "extend" and value == []:
            return  # nothing to add is no nonsense
        fields = dict.fromkeys(("shards", "order", "reads", "position", "of", "lease", "beyond", "urls"), value)
        assert self.ask(kind, **fields)["error"]["code"] in ("protocol", "not_found")

    @invariant()
    def the_daemon_holds_what_is_in_hand(self) -> None:
        """Each shard is pinned as often as the model says, no more and no less."""
        self.session.send(type="explain", id=10**6, of=0)
        assert self.session.receive()["type"] == "waiting"
        held = Counter(url for url, needed in self.shard_window.values() if needed)
        assert {each["url"]: each["leases"] for each in self.daemon.shards() if each["leases"]} == held

    def teardown(self) -> None:
        """Leave without a word: every lease ends."""
        self.session.close()
        eventually(lambda: self.daemon.leases() == 0)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon for all examples."""
    with Daemon(tmp_path_factory.mktemp("d"), "--log-level", "warning") as running:
        yield running


def test_leases_are_what_the_model_says(daemon: Daemon) -> None:
    """Twenty requests in any order, many times over; afterwards no lease and no traceback is left."""
    urls = [f"file://{path}" for path in write_shards(daemon.root, SHARDS, 3)]
    found = type("Found", (Machine,), {"daemon": daemon, "urls": urls})
    limits = settings(max_examples=20, stateful_step_count=20, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(found, settings=limits)
    assert "Traceback" not in daemon.log.read_text()
