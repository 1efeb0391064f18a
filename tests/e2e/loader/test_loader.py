"""`ShardDataset.loader`: batches, lengths, epochs, and a state for any number of workers."""

import copy
import gc
import json
import multiprocessing
import multiprocessing.util
import os
import pickle
import signal
from collections.abc import Callable
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data
from torchdata.stateful_dataloader import StatefulDataLoader

from shardcache.errors import ConfigError, DecodeError, MissingMemberError
from shardcache_client.dataset import ShardDataset
from shardcache_client.loading.loader import ShardLoader
from support.cases import first_quick
from support.programs.daemon import Daemon
from support.programs.guard import GUARD_S
from support.programs.processes import children
from support.shards.reading import keys_of
from support.shards.tars import BATCH, COUNTS, KEYS, Make, make_tar

# The machine may have fewer CPUs than a test has workers; torchdata 0.11 with torch 2.13.
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]


def load(dataset: ShardDataset, workers: int, **options: Any) -> ShardLoader[list[str]]:
    """Return a loader of lists of keys."""
    return dataset.loader(num_workers=workers, collate_fn=keys_of, **options)


def state_after(loader: ShardLoader[list[str]], batches: int) -> Any:
    """Return the state after a number of batches, as a checkpoint gives it back."""
    iterator = iter(loader)
    assert len(list(islice(iterator, batches))) == batches
    return json.loads(json.dumps(loader.state_dict()))


@pytest.mark.slow
def test_a_short_batch_is_dropped_if_asked_for(make: Make) -> None:
    """`drop_last` holds for batches and length. Without it, every sample comes once."""
    whole = load(make(), 2)
    loader = load(make(), 2, drop_last=True)
    assert len(whole) == 12
    assert sorted(chain(*whole)) == KEYS
    assert len(loader) == len(KEYS) // BATCH == 11
    assert [(loader.epoch, loader.remaining) for _ in loader] == [
        (0, left) for left in range(10, -1, -1)
    ]
    assert loader.epoch == 1
    assert loader.remaining == 11
    loader.load_state_dict(loader.state_dict())
    assert loader.epoch == 1
    assert loader.remaining == len(loader)


@pytest.mark.slow
def test_uncounted_shards_resume_exactly_too(make: Make, folder: Path) -> None:
    """The workers' own states know how far they are; no count is needed, and no torchdata."""
    pattern = f"file://{folder}/train/{{0..{len(COUNTS) - 1}}}.tar"

    def uncounted(name: str) -> Daemon:
        (folder / name).mkdir()
        return Daemon(folder / name)

    with uncounted("whole") as fresh:
        whole = list(load(make(pattern, socket=fresh.socket), 2))
    with uncounted("first") as fresh:
        state = state_after(load(make(pattern, socket=fresh.socket), 2), 5)
    with uncounted("rest") as fresh:
        resumed = load(make(pattern, socket=fresh.socket), 2)
        resumed.load_state_dict(state)
        assert list(resumed) == whole[5:]


@pytest.mark.slow
def test_a_loader_changes_nothing_of_its_dataset(make: Make) -> None:
    """Splits and other loaders keep its batch size and epochs, even after a refused one."""
    dataset = make()
    with pytest.raises(ConfigError, match="does not take shuffle"):
        dataset.loader(batch_size=8, shuffle=True)
    train = load(dataset, 0)
    evaluate = load(dataset, 0, batch_size=8)
    part, _ = dataset.split(0.5, 0.5)
    assert dataset.batch_size == BATCH
    assert part.batch_size == BATCH
    assert len(train) == 12
    assert len(evaluate) == 6
    read = []
    for batch in train:
        read.append(batch)
        if len(read) % 6 == 0:
            assert sorted(chain(*evaluate)) == KEYS
    assert read == list(load(make(), 0))
    assert dataset.epoch == 0
    assert train.epoch == 1
    assert evaluate.epoch == 2
    assert make().loader(num_workers=0).batch_size == BATCH
    singles = make().loader(batch_size=None, num_workers=0)
    assert len(singles) == len(list(singles)) == len(KEYS)


@pytest.mark.parametrize(
    ("ranks", "workers"), [("", 8), ("4", 3), ("100", 1), ("0", 8), ("two", 8)]
)
def test_default_workers_share_the_cpus_with_the_ranks_of_the_node(
    make: Make, monkeypatch: pytest.MonkeyPatch, ranks: str, workers: int
) -> None:
    """At most 8; a variable that is no number of ranks is as good as none."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: range(12))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert make().loader().num_workers == workers


def test_epoch_and_state_that_are_set_in_the_dataset_hold_for_its_loaders(make: Make) -> None:
    """The last setting holds, also one made by a framework, and a state is used once."""
    dataset = make()
    loader = load(dataset, 0)
    epochs = [list(loader) for _ in range(3)]
    dataset.set_epoch(1)
    assert loader.epoch == 1
    assert list(loader) == epochs[1]
    assert list(loader) == epochs[1]
    dataset.load_state_dict(state_after(load(make(), 0), 5))
    assert loader.epoch == 0
    assert loader.remaining == 7
    assert list(loader) == epochs[0][5:]
    dataset.set_epoch(0)
    assert loader.remaining == 12
    assert list(loader) == epochs[0]
    loader.set_epoch(2)
    assert list(loader) == epochs[2]


def read_to_its_end(loader: ShardLoader[list[str]], answers: Any) -> None:
    """Read an epoch in another process."""
    answers.put((loader.epoch, list(loader)))


@pytest.mark.parametrize(
    "copied", first_quick([copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
)
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_copy_of_a_loader_is_where_the_loader_is(
    make: Make, copied: Callable[[ShardLoader[list[str]]], ShardLoader[list[str]]], workers: int
) -> None:
    """Before the first batch, in the middle of an epoch and at its end; the loop goes on."""
    whole = load(make(), workers)
    epochs = [list(whole) for _ in range(2)]
    loader = load(make(), workers)
    assert list(copied(loader)) == epochs[0]
    batches = iter(loader)
    taken = list(islice(batches, 5))
    found = copied(loader)
    assert found.epoch == loader.epoch
    assert found.remaining == loader.remaining
    assert found.state_dict() == loader.state_dict()
    assert list(found) == epochs[0][5:]
    assert list(found) == epochs[1]
    assert taken + list(batches) == epochs[0]
    assert list(copied(loader)) == epochs[1]


def test_copy_of_a_loader_has_the_epoch_that_was_set(make: Make) -> None:
    """The position is within it, and each later iterator reads it whole."""
    loader = load(make(), 0)
    loader.set_epoch(3)
    whole = list(loader)
    batches = iter(loader)
    list(islice(batches, 5))
    found = copy.deepcopy(loader)
    assert [list(found), list(found)] == [whole[5:], whole]


def test_shallow_copy_of_a_loader_leaves_its_loop(make: Make) -> None:
    """It shares the position of the loader, whose iterator reads on."""
    whole = list(load(make(), 0))
    loader = load(make(), 0)
    batches = iter(loader)
    taken = list(islice(batches, 5))
    assert copy.copy(loader).state_dict() == loader.state_dict()
    assert taken + list(batches) == whole


@pytest.mark.slow
def test_loader_that_is_sent_to_another_process_is_where_it_was(make: Make) -> None:
    """In the middle of an epoch, with persistent workers."""
    loader = load(make(), 2)
    other = load(make(), 2)
    batches = iter(loader)
    list(islice(batches, 5))
    context: Any = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    process = context.Process(target=read_to_its_end, args=(loader, answers))
    process.start()
    assert answers.get() == (0, list(other)[5:])
    process.join(GUARD_S)
    assert len(list(batches)) == 7


@pytest.mark.slow
def test_loader_of_a_forked_process_begins_the_next_epoch(make: Make) -> None:
    """It has no part in the loop of its parent, not even in one with persistent workers."""
    loader = load(make(), 2)
    second = load(make(), 2)
    second.set_epoch(1)
    batches = iter(loader)
    list(islice(batches, 5))
    context: Any = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=read_to_its_end, args=(loader, answers))
    process.start()
    assert answers.get() == (1, list(second))
    process.join(GUARD_S)
    assert len(list(batches)) == 7


def test_a_member_that_some_samples_lack_is_named(make: Make, tmp_path: Path) -> None:
    """Not collate's KeyError: the error says which sample of which shard."""
    samples = [{"__key__": "a", "jpg": b"1", "cls": b"0"}, {"__key__": "b", "jpg": b"2"}]
    (tmp_path / "lacking.tar").write_bytes(make_tar(samples))
    loader = make(f"file://{tmp_path}/lacking.tar", shuffle=False).loader(
        batch_size=2, num_workers=1
    )
    with pytest.raises(MissingMemberError, match="'b' has no member 'cls'") as caught:
        list(loader)
    assert caught.value.url == f"file://{tmp_path}/lacking.tar"
    assert "members=('jpg', 'cls'), with missing='skip'" in caught.value.remedy
    assert "or read members=('jpg',) alone" in caught.value.remedy


def test_the_remedy_of_a_member_that_some_samples_lack_holds(make: Make, tmp_path: Path) -> None:
    """Each of its three forms reads the shard."""
    samples = [{"__key__": "a", "jpg": b"1", "cls": b"0"}, {"__key__": "b", "jpg": b"2"}]
    (tmp_path / "lacking.tar").write_bytes(make_tar(samples))
    found = []
    for options in (
        {"members": ("jpg", "cls"), "missing": "skip"},
        {"members": ("jpg", "cls"), "missing": {"cls": b"9"}},
        {"members": ("jpg",)},
    ):
        dataset = make(f"file://{tmp_path}/lacking.tar", shuffle=False, **options)
        batches = list(dataset.loader(batch_size=2, num_workers=0))
        found.append([key for batch in batches for key in batch["__key__"]])
    assert found == [["a"], ["a", "b"], ["a", "b"]]


@pytest.mark.slow
def test_frameworks_leave_it_alone(make: Make) -> None:
    """Accelerate returns it as it is, so that nothing is sharded twice."""
    from accelerate import Accelerator

    loader = load(make(), 2, prefetch_factor=3)
    assert Accelerator(cpu=True).prepare(loader) is loader
    assert loader.num_workers == 2
    assert loader.prefetch_factor == 3
    assert loader.drop_last is False
    with pytest.raises(AttributeError, match="no attribute 'sampler'"):
        _ = loader.sampler


# Where something goes wrong, or comes at an unusual moment


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_before_the_first_batch_does_not_empty_later_epochs(
    make: Make, tmp_path: Path, workers: int
) -> None:
    """A loop that begins again reads samples again."""
    mended = tmp_path / "mended"

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        if not mended.exists():
            raise ValueError("not yet")
        return sample

    loader = load(make(decode=decode), workers)
    before = {*children(os.getpid())}
    with pytest.raises(DecodeError, match="not yet"):
        next(iter(loader))
    assert {*children(os.getpid())} == before, (
        "no worker is left for the collector, which waits for each"
    )
    mended.touch()
    assert sorted(chain(*loader)) == KEYS
    assert sorted(chain(*loader)) == KEYS


@pytest.mark.slow
def test_loader_resumes_where_a_worker_was_killed(make: Make) -> None:
    """The kill is an error; the state of before it has every other sample, read by new workers."""
    loader = load(make(), 2, prefetch_factor=1)
    before = {*children(os.getpid())}
    batches = iter(loader)
    taken = list(islice(batches, 3))
    workers = {*children(os.getpid())} - before
    assert len(workers) == 2
    os.kill(workers.pop(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"killed by signal|exited unexpectedly"):
        taken.extend(batches)
    loader.load_state_dict(loader.state_dict())
    assert sorted(chain(*taken, *loader)) == KEYS


@pytest.mark.parametrize("persistent", first_quick([True, False]))
def test_a_loader_given_up_ends_its_workers_at_once(make: Make, persistent: bool) -> None:
    """Not when garbage happens to be collected, which may be in a process forked since."""
    before = {*children(os.getpid())}
    gc.disable()
    try:
        loader = load(make(), 2, persistent_workers=persistent)
        batches = iter(loader)
        next(batches)
        assert {*children(os.getpid())} > before
        del batches, loader
        assert {*children(os.getpid())} == before
    finally:
        gc.enable()


def test_workers_of_a_loader_in_a_cycle_are_told_to_end(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer of Lightning's makes such a cycle. They do not wait for torch's next check.

    That comes long after torch's patience with workers, which it then terminates.
    """
    monkeypatch.setattr(torch.utils.data._utils.worker, "MP_STATUS_CHECK_INTERVAL", 10 * GUARD_S)

    def note_the_end(worker: int) -> None:
        multiprocessing.util.Finalize(None, (tmp_path / str(worker)).touch, exitpriority=0)

    loader = load(make(), 2, persistent_workers=True, worker_init_fn=note_the_end)
    list(loader)
    holder: dict[str, Any] = {"loader": loader}
    holder["self"] = holder
    del loader, holder
    gc.collect()
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}


def test_batches_out_of_order_are_refused(make: Make) -> None:
    """A state would not tell which of them were taken."""
    with pytest.raises(ConfigError, match="in_order=False"):
        load(make(), 2, in_order=False)


@pytest.mark.parametrize("workers", first_quick([0, 2]))
@pytest.mark.parametrize("options", [{}, {"batch_size": 1, "global_batch_size": 8}])
def test_other_ranks_resume_after_the_end_of_a_stateful_loaders_epoch(
    make: Make, workers: int, options: dict[str, Any]
) -> None:
    """With the next epoch: not with what is left of the last one, which is nothing."""
    dataset = make(rank=0, world_size=2, **options)
    loader: Any = StatefulDataLoader(
        dataset, batch_size=dataset.batch_size, num_workers=workers, collate_fn=keys_of
    )
    list(loader)
    state = loader.state_dict()
    for ranks in (1, 2):
        resumed = [make(rank=rank, world_size=ranks, **options) for rank in range(ranks)]
        for each in resumed:
            each.load_state_dict(state)
            assert each.epoch == 1
        assert {key for each in resumed for key in keys_of(each)} == set(KEYS)
