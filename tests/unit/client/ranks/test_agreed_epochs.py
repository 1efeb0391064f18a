"""torch_group.py over torch's own store: a lone look restarts an epoch; ranks go on in step."""

import pickle
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from shardcache.errors import EpochMismatchError
from shardcache_client.order.topology import Topology
from shardcache_client.ranks.agreed_epochs import AgreedEpochs
from shardcache_client.ranks.key_value_store import StoreAddress, StoreLocator

WORLD = 3
IN_VAIN_S = 0.3
PATIENT_S = 30.0


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    """A store as the first rank or torchrun holds it."""
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    return TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20)
    )


class Rank:
    """One rank's count of epochs, as `Epochs` keeps it."""

    def __init__(
        self,
        server: TCPStore,
        rank: int,
        patience_s: float = PATIENT_S,
        name: str = "train/0",
        process: int = 0,
        processes: int = WORLD,
        world_size: int = WORLD,
    ) -> None:
        place = StoreLocator(StoreAddress("127.0.0.1", server.port, processes, process))
        topology = partial(Topology, rank, world_size)
        compare = partial(int)
        # As in a loader's worker, to which the dataset was pickled.
        self._one = pickle.loads(
            pickle.dumps(AgreedEpochs(name, place, topology, compare, patience_s))
        )
        self._last: int | None = None
        self._read = True

    def begin(self) -> int:
        """Begin an iteration; return its epoch."""
        following = 0 if self._last is None else self._last + 1
        if not self._read and self._last is not None:
            following = self._one.epoch_after(self._last, counted_next=following)
        self._one.begin(following)
        self._last = following
        self._read = False
        return self._last

    def leave(self) -> None:
        """Drop an iteration before its end."""
        self._one.leave(self._last or 0)

    def resume(self, epoch: int) -> None:
        """Go on with an epoch of an earlier run."""
        self._last = epoch - 1

    def read(self) -> int:
        """Read an epoch to its end."""
        epoch = self.begin()
        self._read = True
        return epoch


def ranks(server: TCPStore, patience_s: float = PATIENT_S) -> list[Rank]:
    """Return all ranks of a job."""
    return [Rank(server, rank, patience_s) for rank in range(WORLD)]


def at_once(calls: list[Callable[[], int]]) -> list[int]:
    """Call all at the same time; return what each returned."""
    with ThreadPoolExecutor(len(calls)) as pool:
        ends: list[Future[int]] = [pool.submit(call) for call in calls]
        return [end.result() for end in ends]


def test_a_rank_that_runs_ahead_is_warned(
    server: TCPStore, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that only looked, while a loader's workers read a short epoch ahead to its end."""
    ahead, *others = ranks(server)
    ahead.read()
    for epoch in range(2):
        assert [ahead.read(), *(rank.read() for rank in others)] == [epoch + 1, epoch, epoch]
    assert [
        f"begins epoch {epoch}" in record.message for epoch, record in enumerate(caplog.records, 1)
    ] == [True] * 2
    caplog.clear()
    in_step = [Rank(server, rank, name="in step") for rank in range(WORLD)]
    for rank in in_step:
        rank.resume(5)
    for epoch in (5, 6, 7):
        assert [rank.read() for rank in in_step] == [epoch] * WORLD
    assert not caplog.records
    assert [ahead.read() for _ in range(3)] == [3, 4, 5], (
        "no rank waits for another, however far ahead it is"
    )


@pytest.mark.slow
def test_a_rank_that_looks_before_the_others_begin(server: TCPStore) -> None:
    """Once or three times: after its patience it reads with them the epoch at which it looked."""
    first, second, third = ranks(server, IN_VAIN_S)
    assert [first.begin(), first.begin(), first.read()] == [0, 0, 0]
    assert [rank.read() for rank in (second, third)] == [0, 0]
    assert [rank.read() for rank in (first, second, third)] == [1, 1, 1]


def test_a_rank_that_looks_while_the_others_have_begun(server: TCPStore) -> None:
    """After its patience it reads their epoch with them."""
    first, second, third = ranks(server, IN_VAIN_S)
    assert [rank.begin() for rank in (first, second, third)] == [0, 0, 0]
    assert first.read() == 0
    second._read = third._read = True
    assert [rank.read() for rank in (third, first, second)] == [1, 1, 1]


def test_a_loop_that_every_rank_leaves_early(server: TCPStore) -> None:
    """Each pass is another epoch: whoever leaves first waits for the last."""
    job = ranks(server)
    assert [at_once([rank.begin for rank in job]) for _ in range(4)] == [
        [number] * WORLD for number in range(4)
    ]


def test_rank_that_looks_after_all_have_left_an_epoch_does_not_wait(server: TCPStore) -> None:
    """The rank begins the next epoch, since others may wait for it in a barrier."""
    job = ranks(server, IN_VAIN_S)
    for epoch in range(3):
        assert at_once([rank.begin for rank in job]) == [epoch] * WORLD
        for rank in job:
            rank.leave()
        assert job[0]._one.epoch_after(epoch, counted_next=epoch + 1) == epoch + 1


@pytest.mark.slow
def test_all_ranks_look_before_they_train(server: TCPStore) -> None:
    """All ranks or one alone may look, as for a batch's shape, and none waits in vain."""
    job = ranks(server)
    assert [rank.begin() for rank in job] == [0, 0, 0]
    assert at_once([rank.begin for rank in job]) == [1, 1, 1]
    first, *others = (Rank(server, rank, IN_VAIN_S, name="other/0") for rank in range(WORLD))
    assert [first.begin(), first.begin()] == [0, 0]
    assert [rank.begin() for rank in others] == [0, 0]
    assert [rank.begin() for rank in others] == [0, 0]


def test_ranks_go_on_where_only_some_have_given_their_last_sample(server: TCPStore) -> None:
    """All ranks go on to the next epoch when a loop ends early and one has finished."""
    first, second, third = ranks(server)
    assert [first.read(), second.begin(), third.begin()] == [0, 0, 0]
    assert at_once([second.begin, first.read, third.begin]) == [1, 1, 1]


@pytest.mark.slow
def test_rank_that_leaves_repeatedly_is_warned(server: TCPStore) -> None:
    """The error names the rank, the epoch and the remedy."""
    first, second, _ = ranks(server, IN_VAIN_S)
    second.begin()
    assert [first.begin() for _ in range(3)] == [0, 0, 0]
    with pytest.raises(
        EpochMismatchError, match=r"rank 0 has ended epoch 0 [\s\S]*set_epoch\(epoch\)"
    ):
        first.begin()


def test_datasets_restarts_and_jobs_of_one_rank_are_apart(
    server: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epochs of another dataset, or from before torchrun started the ranks anew, do not count."""
    for rank in range(WORLD):
        Rank(server, rank, name="validation/0").begin()
    assert Rank(server, 0).begin() == 0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    alone = Rank(server, 1, IN_VAIN_S)
    assert [alone.begin(), alone.begin()] == [0, 0]
    keys = server.num_keys()
    epochs = AgreedEpochs("train/0", StoreLocator(), Topology, int, PATIENT_S)
    assert epochs.epoch_after(4, counted_next=5) == 5
    assert server.num_keys() == keys


def test_replicas_leave_an_epoch_with_one_rank_of_each_share(server: TCPStore) -> None:
    """Four processes of two shares leave early and go on to the next epoch without a wait."""
    job = [
        Rank(server, process // 2, process=process, processes=4, world_size=2)
        for process in range(4)
    ]
    assert [at_once([rank.begin for rank in job]) for _ in range(3)] == [
        [number] * 4 for number in range(3)
    ]
