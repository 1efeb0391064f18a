"""A reading process's connection, message by message, against a real daemon."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardcache.shared.lists.shard_columns import Shards
from shardcache.shared.protocol import ShardRef, unbundled
from support.programs.daemon import Daemon, eventually
from support.programs.raw_session import RawSession as Session
from support.shards.tars import write_shards

SHARDS = 4


@pytest.fixture
def urls(tmp_path: Path) -> list[str]:
    return [f"file://{path}" for path in write_shards(tmp_path, SHARDS, 10)]


def leases(daemon: Daemon, url: str) -> int:
    return next((int(shard["leases"]) for shard in daemon.shards() if shard["url"] == url), 0)


def job_of(daemon: Daemon, name: str) -> dict[str, Any]:
    """Return what the status page says of a job."""
    return next(job for job in daemon.status()["jobs"] if job["name"] == name)


def evict(daemon: Daemon, url: str) -> None:
    """Evict a shard; the daemon itself may have it open for a moment, to bring it into memory."""
    eventually(
        lambda: json.loads(daemon.request("POST", "/v1/evict", {"urls": [url]}))["evicted"] == [url]
    )


def test_leases_end_with_the_connection(daemon: Daemon, urls: list[str]) -> None:
    """A reader that goes without a word leaves nothing behind, however much it had in hand."""
    with Session(daemon, job="vanishing") as session:
        session.plan(urls, [0, 1, 2, 3])
        for position in range(3):
            session.take(position)
        session.ask("lease", position=3)
        assert [leases(daemon, url) for url in urls] == [1, 1, 1, 0]
    eventually(lambda: sum(leases(daemon, url) for url in urls) == 0)
    assert job_of(daemon, "vanishing")["sessions"] == 0


def test_one_of_a_users_readers_sends_a_list(daemon: Daemon) -> None:
    """The others wait until it has sent it; if it goes before that, the next one does."""
    lists = [Shards.of([ShardRef(f"s3://bucket/{name}.tar")]) for name in "ab"]
    with Session(daemon, job="second") as second:
        with Session(daemon, job="first") as first:
            for each in lists:
                assert first.ask("shards", fingerprint=each.fingerprint)["type"] == "unknown"
                second.request("shards", fingerprint=each.fingerprint)
                if each is lists[0]:
                    answer = first.ask("shards", fingerprint=each.fingerprint, packed=each.packed)
                    assert answer["type"] == "ok"
                    assert second.receive()["type"] == "ok"
        assert second.receive()["type"] == "unknown"


def test_a_declared_plan_is_fetched_without_being_asked_for(
    daemon: Daemon, urls: list[str]
) -> None:
    """Fetching ahead needs nothing but the plan, the next epoch's part included."""
    with Session(daemon, job="foresighted") as session:
        session.plan(urls, [0, 1, 3], reads=2)
        assert job_of(daemon, "foresighted")["shards_planned"] == 2
        cached = {urls[0], urls[1], urls[3]}
        eventually(lambda: cached <= {shard["url"] for shard in daemon.shards()})
        assert urls[2] not in {shard["url"] for shard in daemon.shards()}


def test_counts_of_this_node_alone_are_told_from_those_of_an_index(
    daemon: Daemon, urls: list[str]
) -> None:
    """A reader that sends a list with them, as after a restart, does not publish them."""
    with Session(daemon) as session:
        session.plan([ShardRef(urls[0], samples=10)], [0])
        session.take(0)
        answer = session.ask("resolve", urls=urls[:1])
        assert answer["remembered"] == 1
        assert Shards.unpack(answer["packed"])[0].samples == 10


def test_a_plan_goes_in_pieces(daemon: Daemon, urls: list[str]) -> None:
    """Positions that `extend` adds are read and fetched ahead like the rest."""
    with Session(daemon) as session:
        session.plan(urls[:3], [0])
        assert session.ask("extend", order=[2, 0])["type"] == "ok"
        for position, url in enumerate([urls[0], urls[2], urls[0]]):
            leased = session.ask("lease", position=position)
            assert leased["url"] == url
            session.send(type="release", lease=leased["lease"])


def test_several_in_hand_are_all_pinned_until_each_is_given_back(
    daemon: Daemon, urls: list[str]
) -> None:
    """In whichever order that is; none of them can be evicted meanwhile."""
    with Session(daemon, job="juggling") as session:
        session.plan(urls, [3, 1, 0, 2])
        held = {
            url: session.take(position)["lease"]
            for position, url in enumerate(urls[n] for n in (3, 1, 0))
        }
        assert [leases(daemon, url) for url in urls] == [1, 1, 0, 1]
        answer = json.loads(daemon.request("POST", "/v1/evict", {"urls": urls}))
        assert {kept["url"] for kept in answer["kept"]} == held.keys()
        assert {kept["reason"] for kept in answer["kept"]} == {"in use by 1 reader(s)"}
        for done, url in enumerate((urls[1], urls[3], urls[0]), 1):
            session.send(type="release", lease=held.pop(url))
            session.settle()
            assert {each for each in urls if leases(daemon, each)} == held.keys()
            assert job_of(daemon, "juggling")["shards_done"] == done


def test_unneeded_grants_can_be_returned(daemon: Daemon, urls: list[str]) -> None:
    """A shard that was only asked for does not count as read, even if a word of it is late."""
    with Session(daemon, job="changing its mind") as session:
        session.plan(urls, [0, 1])
        leased = session.ask("lease", position=0)
        for message in (
            {"type": "release", "lease": leased["lease"]},
            {"type": "need", "of": leased["lease"]},
        ):
            session.send(**message)
            session.send(**message)
        assert session.take(1)["url"] == urls[1]
        assert leases(daemon, urls[0]) == 0
        assert leases(daemon, urls[1]) == 1
        assert job_of(daemon, "changing its mind")["shards_done"] == 0


@pytest.mark.parametrize(("told", "done"), [({}, 1), ({"read": False}, 0)])
def test_a_lease_ahead_that_lost_its_place_is_asked_for_again(
    daemon: Daemon, urls: list[str], told: dict[str, bool], done: int
) -> None:
    """Asking holds nothing. Only a reader that opened the file before its eviction has read it."""
    path = Path(urls[0].removeprefix("file://"))
    job = f"robbed, {done} read"
    with Session(daemon, job=job) as session:
        session.plan(urls, [0])
        ahead = session.ask("lease", position=0)
        assert leases(daemon, urls[0]) == 0
        path.rename(path.with_suffix(".aside"))  # else the plan brings it back at once
        evict(daemon, urls[0])
        session.need(ahead["id"])
        session.send(type="release", lease=ahead["lease"], **told)
        session.settle()
        assert job_of(daemon, job)["shards_done"] == done
        path.with_suffix(".aside").rename(path)
        assert Path(session.take(0)["path"]).exists()
        assert leases(daemon, urls[0]) == 1


@pytest.mark.slow
def test_leases_without_end_are_refused(daemon: Daemon, urls: list[str]) -> None:
    """A client that forgets to give back is told so, and what it has stays its own."""
    with Session(daemon) as session:
        session.plan(urls, [0] * 5000)
        for number in range(4097):
            session.send(type="lease", id=1000 + number, position=number)
        answers = [session.receive() for _ in range(4097)]
        assert [answer["type"] for answer in answers].count("leased") == 4096
        (refusal,) = (answer for answer in answers if answer["type"] == "error")
        assert refusal["error"]["code"] == "protocol"
        assert "4096 leases" in refusal["error"]["message"]
        session.need(next(answer["id"] for answer in answers if answer["type"] == "leased"))
        assert leases(daemon, urls[0]) == 1


def test_a_flood_of_requests_slows_its_sender_alone(daemon: Daemon, urls: list[str]) -> None:
    """Thousands of requests are answered, with another session served among them."""
    with Session(daemon) as flooding, Session(daemon) as other:
        flooding.plan(urls, [0])
        other.plan(urls, [1])
        for number in range(3000):
            flooding.send(type="explain", id=100 + number, of=0)
        assert other.ask("lease", position=0)["type"] == "leased"
        assert [flooding.receive()["id"] for _ in range(3000)] == list(range(100, 3100))


def test_one_shard_crosses_the_network_once(daemon: Daemon, urls: list[str]) -> None:
    """Readers that ask at the same time share one transfer."""
    before = daemon.status()["counters"]["origin_bytes"]
    sessions = [Session(daemon, job=f"job{number}") for number in range(5)]
    sessions[0].plan(urls[:1], [0])
    fingerprint = Shards.of([ShardRef(urls[0])]).fingerprint
    for session in sessions[1:]:
        session.send(type="plan", id=8, shards=[fingerprint], order=[0], reads=1)
    for session in sessions:
        session.send(type="lease", id=9, position=0)
    for session in sessions:
        assert session is sessions[0] or session.receive()["type"] == "ok"
        assert session.receive()["type"] == "leased"
        session.__exit__()
    size_bytes = Path(urls[0].removeprefix("file://")).stat().st_size
    assert daemon.status()["counters"]["origin_bytes"] - before == size_bytes


NONSENSE: tuple[tuple[dict[str, Any], str], ...] = (
    ({"type": "lease", "id": 7, "position": "first"}, "position"),
    ({"type": "lease", "id": 7, "position": 99}, "no position 99"),
    ({"type": "lease", "id": 7, "position": True}, "position"),
    ({"type": "shards", "id": 7, "packed": b"x"}, "fingerprint"),
    ({"type": "shards", "id": 7, "fingerprint": "x", "packed": b"x"}, "not a list of shards"),
    ({"type": "plan", "id": 7, "shards": [""], "order": []}, "reads"),
    ({"type": "extend", "id": 7, "order": [4]}, "indices"),
    ({"type": "more", "id": 7, "lease": 10**9, "beyond": 0}, "no lease"),
    ({"type": "resolve", "id": 7, "urls": [1]}, "strings"),
    ({"type": "dance", "id": 7}, "unknown message"),
    ({"type": "lease"}, "'id'"),
    ({"type": "release", "lease": None}, "'lease'"),
    ({"type": "need", "of": "the next"}, "'of'"),
)


def test_nonsense_is_refused_and_the_session_continues(daemon: Daemon, urls: list[str]) -> None:
    """Whatever a client sends, it gets a typed answer, and its next request is served."""
    with Session(daemon) as session:
        session.plan(urls, [0])
        for message, complaint in NONSENSE:
            session.send(**message)
            error = session.receive()["error"]
            assert error["code"] == "protocol", message
            assert complaint in error["message"]
        assert session.ask("lease", position=0)["type"] == "leased"


def test_a_bundle_stands_for_its_messages(daemon: Daemon, urls: list[str]) -> None:
    """Each is answered, whether it is right or wrong, and whatever it asks for."""
    with Session(daemon, bundles=True) as session:
        assert session.welcome["bundles"]
        session.plan(urls, [0, 1, 2, 3], wanted="ranges")
        ranges = [(101, 0, 0), (102, 0, 600), (103, 3, 100), (104, 9, 0)]
        asked = [
            {
                "type": "lease",
                "id": number,
                "position": position,
                "start": start,
                "beyond": start + 9,
                "needed": True,
            }
            for number, position, start in ranges
        ]
        session.send(
            type="bundle",
            messages=[*asked, {"type": "explain", "id": 105, "of": 0}, {"type": "new"}],
        )
        answers: list[dict[str, Any]] = []
        while len(answers) < 6:
            answers += unbundled(session.receive())
        kinds = {answer["id"]: answer["type"] for answer in answers}
        granted = {"arriving", "leased"}
        assert {kinds[101], kinds[102], kinds[103]} <= granted
        assert kinds[104] == "error"
        assert kinds[105] == "waiting"
        assert kinds[None] == "error"
        # Such small files are fetched whole; until one is published, a grant may take a turn of its
        # own.
        eventually(lambda: {urls[0], urls[3]} <= {shard["url"] for shard in daemon.shards()})

        again = [dict(message, id=message["id"] + 100) for message in asked[:3]]
        session.send(type="bundle", messages=again)
        answer = session.receive()
        assert answer["type"] == "bundle"
        assert [message["id"] for message in answer["messages"]] == [201, 202, 203]
        ended = [{"type": "release", "lease": number} for number in (101, 102, 103, 201, 202, 203)]
        session.send(type="bundle", messages=ended)
        eventually(lambda: daemon.leases() == 0)


def test_a_client_of_an_earlier_release_gets_single_answers(
    daemon: Daemon, urls: list[str]
) -> None:
    """It does not know what a bundle is, however many answers come at the same time."""
    with Session(daemon) as session:
        session.plan(urls, [0, 1, 2, 3], wanted="ranges")
        asked = [
            session.request("lease", position=nth % 4, start=nth, beyond=nth + 9)
            for nth in range(20)
        ]
        assert {session.answer(request)["type"] for request in asked} <= {"arriving", "leased"}


def test_a_bundle_of_too_many_messages_is_refused(daemon: Daemon) -> None:
    """The session continues."""
    with Session(daemon, bundles=True) as session:
        session.send(type="bundle", messages=[{"type": "need", "of": 1}] * 10_000)
        assert "at most" in session.receive()["error"]["message"]
        session.settle()
