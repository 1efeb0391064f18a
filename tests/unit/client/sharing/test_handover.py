"""handover.py: bytes cross to a relative as references, and the sender hears of it."""

import mmap
import multiprocessing
import os
import pickle
import signal
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest

from shardcache.errors import ConfigError
from shardcache.shared.tarindex.tables import Samples
from shardcache.store.disk.open_files import is_open_elsewhere
from shardcache_client.samples.mapped_file import ShardGoneError
from shardcache_client.sharing.acks import Acks
from shardcache_client.sharing.buffer import Buffer
from shardcache_client.sharing.handover import Handover, Loan
from support.cases import first_quick
from support.programs.processes import memfds

CONTENT = os.urandom(1 << 20)
PIECE_BYTES = 5000
METHODS = ("fork", "spawn", "forkserver")


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """A file with CONTENT."""
    path = tmp_path / "shard.tar"
    path.write_bytes(CONTENT)
    return path


def piece(number: int) -> bytes:
    """Return one of many parts of CONTENT, large enough to be referred to."""
    return CONTENT[number * PIECE_BYTES : (number + 1) * PIECE_BYTES]


def lend(handover: Handover, path: Path) -> Loan:
    """Map a file as a reader does, and lend it."""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    return handover.lend(mapped, path, path.stat().st_ino, f"s3://bucket/{path.name}")


class Lender:
    """One shard that a worker lends, and what was cut of it."""

    def __init__(self, handover: Handover, path: Path) -> None:
        self._handover = handover
        self._loan = lend(handover, path)
        self._values: list[Any] = []

    def cut(self, number: int) -> None:
        """Cut a piece and keep it."""
        first = number * PIECE_BYTES
        self._values.append(self._loan.whole()[first : first + PIECE_BYTES])

    def message(self, *numbers: int) -> bytes:
        """Cut pieces, pickle all that was cut as a DataLoader's queue does, and let go of it."""
        for number in numbers:
            self.cut(number)
        data = bytes(ForkingPickler.dumps(self._values))
        self._values = []
        return data

    def odd_views(self) -> list[bytes]:
        """Cut slices of slices, small, empty and scattered ones; return what they hold."""
        value: Any = self._loan.whole()[1000:90_000]
        self._values = [
            value,
            value[10:60_000][2:50_000],
            value[0:0],
            value[:10],
            value[:50_000:5],
            value[49_999::-1],
            value[:6000].reshape(2, 3000),
            value[:5000].copy(),
        ]
        return list(map(bytes, self._values))

    def pickled_elsewhere(self) -> bytes:
        """Pickle it as `torch.save` and the like do."""
        return pickle.dumps(self._values)

    def settled(self) -> bool:
        """Return whether the loan is settled."""
        return self._loan.is_settled()

    def forget(self) -> None:
        """Let go of the loan, as at the end of an epoch."""
        del self._loan

    def settle(self) -> None:
        """As the next epoch does when it begins."""
        self._handover.settle()


def work(handover: Handover, path: Path, pipe: Connection) -> None:
    """Obey until the pipe ends."""
    lender = Lender(handover, path)
    for order in iter(pipe.recv, None):
        name, *arguments = order
        pipe.send(getattr(lender, name)(*arguments))


class Sender:
    """A process with a Lender, whose methods it has; a context manager."""

    def __init__(self, handover: Handover, path: Path, method: str = "fork") -> None:
        context: Any = multiprocessing.get_context(method)
        self._handover = handover  # as a loader keeps its dataset
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = context.Process(target=work, args=(handover, path, theirs))

    def __enter__(self) -> "Sender":
        self._process.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._process.is_alive():
            self._pipe.send(None)
        self._process.join()

    def kill(self) -> None:
        """Kill the process."""
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments: self._ask(name, *arguments)

    def _ask(self, *order: Any) -> Any:
        self._pipe.send(order)
        return self._pipe.recv()


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_relative_gets_references(shard: Path, method: str) -> None:
    """The message is small, the bytes are right, and both see it settled."""
    with Sender(Handover(), shard, method) as sender:
        sender.cut(0)
        assert not sender.settled()
        message = sender.message(*range(1, 32))
        assert len(message) < 3000
        assert not sender.settled()
        values = pickle.loads(message)
        assert sender.settled()
    assert all(type(value) is Buffer and not value.flags.writeable for value in values)
    assert list(map(bytes, values)) == [piece(number) for number in range(32)]


def test_the_bytes_are_those_of_one_map(shard: Path) -> None:
    """Messages of one shard share the receiver's map, which goes with the last value."""
    handover = Handover()
    with Sender(handover, shard) as one, Sender(handover, shard) as other:
        messages = [one.message(0), one.message(5), other.message(7)]
    values = [pickle.loads(message)[0] for message in messages]
    assert maps_of(shard) == 1
    assert len({id(value.base) for value in values}) == 1
    del values[1:]
    assert bytes(values[0]) == piece(0)
    assert is_open_elsewhere(shard)
    values.clear()
    assert maps_of(shard) == 0
    assert not is_open_elsewhere(shard)


def maps_of(path: Path) -> int:
    """Return how often this process has a file mapped."""
    return Path("/proc/self/maps").read_text().count(str(path))


def test_every_message_counts_and_none_twice(shard: Path) -> None:
    """One that is loaded again does not make up for one that is still on its way."""
    with Sender(Handover(), shard) as sender:
        first = sender.message(0)
        second = sender.message(1)
        for _ in range(3):
            assert bytes(pickle.loads(first)[0]) == piece(0)
        assert not sender.settled()
        assert bytes(pickle.loads(second)[0]) == piece(1)
        assert sender.settled()
        third = sender.message(2)
        assert not sender.settled()
        pickle.loads(third)
        assert sender.settled()


def test_samples_in_transit_outlive_their_lease(shard: Path) -> None:
    """The map outlives the borrower and goes once it has arrived and somebody asks."""
    with Sender(Handover(), shard) as sender:
        message = sender.message(0)
        sender.forget()
        sender.settle()
        assert is_open_elsewhere(shard)
        assert bytes(pickle.loads(message)[0]) == piece(0)
        sender.settle()
        assert not is_open_elsewhere(shard)


def test_worker_sends_inherited_views_as_bytes(shard: Path) -> None:
    """Values that were there before it was forked are no loan of its own, and need no receipt."""
    loan = lend(Handover(), shard)
    values = [loan.whole()[:PIECE_BYTES]]
    with in_child(lambda: bytes(ForkingPickler.dumps(values))) as message:
        values.clear()
        shard.unlink()
        assert bytes(pickle.loads(message)[0]) == piece(0)


def test_copied_values_keep_no_shard(shard: Path) -> None:
    """In a shard without a large member, the bytes are the map's own: nobody has to follow them."""
    loan = lend(Handover(), shard)
    tables = Samples(
        extensions=["cls"],
        extension_ids=array("I", [0]),
        starts=array("Q", [512]),
        ends=array("Q", [516]),
    )
    [(extension, tar, decoder)] = loan.columns(tables)
    assert extension == "cls"
    assert decoder is None
    assert isinstance(tar, mmap.mmap)
    assert tar[512:516] == CONTENT[512:516]
    assert loan.is_settled()


def test_any_thread_may_receive(shard: Path) -> None:
    """Messages that many threads load at a time are all told to the sender."""
    with Sender(Handover(), shard) as sender, ThreadPoolExecutor(8) as threads:
        messages = [sender.message(number) for number in range(200)]
        values = list(threads.map(pickle.loads, messages))
        assert sender.settled()
    assert [bytes(value) for (value,) in values] == [piece(number) for number in range(200)]


@contextmanager
def in_child(function: Callable[[], Any]) -> Iterator[Any]:
    """Run a function in a forked process and give what it returns."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=lambda: theirs.send(function()))
    process.start()
    yield ours.recv()
    process.join()


def test_late_receipt_for_a_dead_worker_is_harmless(shard: Path) -> None:
    """The next worker takes the dead one's place, and waits for its own receipt alone."""
    handover = Handover()
    with Sender(handover, shard) as dead:
        late = dead.message(0)
        dead.kill()
    with Sender(handover, shard) as sender:
        message = sender.message(0)
        pickle.loads(late)
        assert not sender.settled()
        pickle.loads(message)
        assert sender.settled()


def test_process_outside_the_handover_gets_an_error(shard: Path) -> None:
    """The error says what to send, as an outside process cannot hand in a receipt."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as stranger:
        stranger.submit(int).result()  # it is started before there is a dataset
        with Sender(Handover(), shard) as sender:
            with pytest.raises(ConfigError, match=r"send bytes\(value\)"):
                stranger.submit(pickle.loads, sender.message(0)).result()
            assert not sender.settled()


@pytest.mark.parametrize("replaced", first_quick([False, True]))
def test_file_that_is_not_there_is_reported(shard: Path, replaced: bool) -> None:
    """The error names shard and remedy, and no other file is read instead."""
    with Sender(Handover(), shard) as sender:
        message = sender.message(0)
        shard.rename(shard.with_name("other.tar"))
        if replaced:
            shard.write_bytes(CONTENT)
        with pytest.raises(ShardGoneError, match="mount") as caught:
            pickle.loads(message)
        assert caught.value.url == "s3://bucket/shard.tar"
        assert not sender.settled()


def test_any_other_pickle_takes_the_bytes_along(shard: Path) -> None:
    """A worker's `pickle.dumps` needs neither file nor family, and no receipt."""
    with Sender(Handover(), shard) as sender:
        sender.cut(0)
        data = sender.pickled_elsewhere()
        pickle.loads(sender.message())
        assert sender.settled()
    shard.unlink()
    assert bytes(pickle.loads(data)[0]) == piece(0)


@pytest.mark.parametrize(
    "again", [lambda handover: handover, lambda handover: pickle.loads(pickle.dumps(handover))]
)
def test_the_process_that_made_it_sends_bytes(
    shard: Path, again: Callable[[Handover], Handover]
) -> None:
    """Nobody follows references from here, so the lease may go and the values keep the map."""
    loan = lend(again(Handover()), shard)
    value = loan.whole()[5:PIECE_BYTES]
    assert loan.is_settled()
    del loan
    message = bytes(ForkingPickler.dumps(value))
    assert maps_of(shard) == 1
    assert bytes(pickle.loads(message)) == bytes(value) == piece(0)[5:]
    del value
    assert maps_of(shard) == 0


def test_slices_of_slices_and_odd_views_arrive_right(shard: Path) -> None:
    """Views that are no run of bytes go by value, as small and empty ones do."""
    with Sender(Handover(), shard) as sender:
        expected = sender.odd_views()
        message = sender.message()
        values = pickle.loads(message)
    assert [bytes(value) for value in values] == expected
    assert len(message) < 80_000


# Acknowledgements


def test_freed_place_starts_over() -> None:
    """Only places under way are taken, and an old receipt changes nothing."""
    acks = Acks()
    cells = set()
    for _ in range(100):
        ack = acks.expect()
        ack.hand_in()
        assert acks.collect(ack)
        cells.add(ack.cell)
    assert len(cells) == 1
    newer = acks.expect()
    ack.hand_in()
    assert not acks.collect(newer)


def test_the_places_are_kept_whatever_else_is_closed() -> None:
    """The kernel's lock survives the closing of another descriptor of the same file."""
    acks = Acks()
    ours = acks.expect()
    for fd in memfds():
        os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDWR))
    with in_child(acks.expect) as theirs:
        assert theirs.cell != ours.cell


def test_acks_leave_no_descriptor_open() -> None:
    """They have no name anywhere; their descriptors go with the object."""
    before = memfds()
    acks = Acks()
    acks.expect()
    assert len(memfds()) == len(before) + 2
    del acks
    assert memfds() == before
