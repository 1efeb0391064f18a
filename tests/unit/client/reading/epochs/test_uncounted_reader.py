"""Samples of uncounted shards through a loader: where an epoch continues, what is lost."""

import tempfile
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest

from shardcache.errors import NotFoundError, OutdatedError
from shardcache_client.dataset import ShardDataset
from shardcache_client.handlers import ignore_and_continue
from support.cases import first_quick
from support.programs.daemon import Daemon
from support.shards.reading import keys_of
from support.shards.tars import write_indexed

Kept = Callable[[dict[str, Any]], bool]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """A daemon in a folder with a short path, as a socket's must be."""
    with tempfile.TemporaryDirectory(prefix="shardcache-") as name, Daemon(Path(name)) as running:
        yield running


class Shards:
    """Shards of a folder, read by one rank of several, so that they stay uncounted."""

    def __init__(self, daemon: Daemon, folder: Path, counts: list[int], **options: Any) -> None:
        self._daemon = daemon
        self._urls = [f"file://{folder}/{number}.tar" for number in range(len(counts))]
        self._options = {"shuffle": True, "shuffle_window": 3, "seed": 7, "even": None} | options
        write_indexed(folder, counts)

    def loader(
        self, state: object = None, *, kept: Kept | None = None, size: int = 1, **options: Any
    ) -> Any:
        """Return a loader of lists of the kept samples' keys, from a state if there is one."""
        chosen = {"rank": 0, "world_size": 2} | self._options | options
        dataset: ShardDataset[Any] = ShardDataset(self._urls, socket=self._daemon.socket, **chosen)
        if kept is not None:
            dataset = dataset.filter(kept)
        loader = dataset.loader(batch_size=size, num_workers=0, collate_fn=keys_of)
        if state is not None:
            loader.load_state_dict(state)
        return loader

    def keys(self, **options: Any) -> list[str]:
        """Return the keys of an epoch."""
        return list(chain(*self.loader(**options)))

    def keys_with_interruptions(self, batches: int, **options: Any) -> list[str]:
        """Return the keys of so many batches, after each of which the run is interrupted."""
        found: list[str] = []
        state = None
        for _ in range(batches):
            loader = self.loader(state, **options)
            iterator = iter(loader)
            found += next(iterator)
            state = loader.state_dict()
        return found


@pytest.mark.slow
@pytest.mark.parametrize("window", [0, 1, 3])
def test_each_sample_comes_once_over_all_ranks(daemon: Daemon, tmp_path: Path, window: int) -> None:
    """Two epochs lose and repeat nothing, with empty shards and more ranks than shards."""
    counts = [5, 0, 9, 1, 4]
    shards = Shards(daemon, tmp_path / "d", counts, shuffle_window=window)
    for world_size in (2, 7):
        ranks = [shards.keys(rank=rank, world_size=world_size) for rank in range(world_size)]
        assert sorted(chain(*ranks)) == [f"{number:06d}" for number in range(sum(counts))]


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("lost", [None, 2, 4])
def test_every_place_is_followed_by_the_next(
    daemon: Daemon, tmp_path: Path, window: int, lost: int | None
) -> None:
    """A run interrupted after each sample goes on, even while a mixed shard is lost."""
    shards = Shards(
        daemon, tmp_path / "d", [5, 0, 4, 1, 6], shuffle_window=window, on_error=ignore_and_continue
    )
    if lost is not None:
        (tmp_path / "d" / f"{lost}.tar").unlink()
    whole = shards.keys()
    found = shards.keys_with_interruptions(len(whole))
    assert found == whole


@pytest.mark.slow
@pytest.mark.parametrize(("kept", "size"), [(1, 3), (7, 4)])
@pytest.mark.parametrize("window", [0, 2])
def test_quota_is_filled_by_further_shares_from_any_place(
    daemon: Daemon, tmp_path: Path, window: int, kept: int, size: int
) -> None:
    """An empty rest of a share is no full pass, so `samples_per_epoch` is still filled."""

    def is_kept(sample: dict[str, Any]) -> bool:
        return int(sample["__key__"]) % kept == 0

    options: dict[str, Any] = {"samples_per_epoch": 23, "world_size": 1, "shuffle": window > 0}
    counts = [1, 5, 14, 2, 0]
    # Read twice, from folders of their own: a lone rank reads in another order what has been
    # counted.
    whole = Shards(daemon, tmp_path / "a", counts, shuffle_window=window, **options).keys(
        kept=is_kept
    )
    shards = Shards(daemon, tmp_path / "b", counts, shuffle_window=window, **options)
    assert len(whole) == 23
    assert shards.keys_with_interruptions(-(-23 // size), kept=is_kept, size=size) == whole


@pytest.mark.parametrize("others", first_quick([3, 0]))
def test_quota_is_filled_from_the_only_shard_with_good_samples(
    daemon: Daemon, tmp_path: Path, others: int
) -> None:
    """All ranks fill it, though the other shards have no samples or none that are kept."""
    good = 4
    counts = [others] * 8
    counts[good] = 5
    kept_keys = {f"{number:06d}" for number in range(others * good, others * good + 5)}
    shards = Shards(daemon, tmp_path / "d", counts, seed=1, samples_per_epoch=24, world_size=4)
    for rank in range(4):
        keys = shards.keys(rank=rank, kept=lambda sample: sample["__key__"] in kept_keys)
        assert len(keys) == 6
        assert set(keys) == kept_keys


@pytest.mark.parametrize("window", first_quick([0, 3]))
def test_lost_shard_ends_an_epoch_whose_handler_raises(
    daemon: Daemon, tmp_path: Path, window: int
) -> None:
    """A shard lost after an interruption is not left out in silence either."""
    shards = Shards(daemon, tmp_path / "d", [6, 6, 6], world_size=1, shuffle_window=window)
    loader = shards.loader()
    batches = iter(loader)
    assert list(islice(batches, 3))
    state = loader.state_dict()
    batches.close()
    for path in (tmp_path / "d").glob("*.tar"):
        path.unlink()
    daemon.empty()
    with pytest.raises(NotFoundError):
        list(shards.loader(state))


@pytest.mark.parametrize("place", first_quick([(9, 2), (12, 0), (4, 1)]))
def test_shard_lost_since_the_state_is_not_left_out_in_silence(
    daemon: Daemon, tmp_path: Path, place: tuple[int, int]
) -> None:
    """The error of a mixed shard would come at a place that the resumed epoch leaves out."""
    taken, lost = place
    shards = Shards(daemon, tmp_path / "d", [6, 6, 6], world_size=1)
    loader = shards.loader()
    batches = iter(loader)
    assert len(list(islice(batches, taken))) == taken
    state = loader.state_dict()
    batches.close()
    (tmp_path / "d" / f"{lost}.tar").unlink()
    daemon.empty()
    with pytest.raises(NotFoundError):
        list(shards.loader(state))


@pytest.mark.parametrize("window", first_quick([0, 3]))
def test_resumed_epoch_does_not_mix_versions_of_a_shard(
    daemon: Daemon, tmp_path: Path, window: int
) -> None:
    """Samples before the state's place came from the version replaced since."""
    folder = tmp_path / "d"
    counts = [6, 6, 6, 6]
    write_indexed(folder, counts)
    # A folder's listing has versions, and no counts.
    dataset: ShardDataset[Any] = ShardDataset(
        f"file://{folder}/",
        socket=daemon.socket,
        shuffle=window > 0,
        shuffle_window=window,
        rank=0,
        world_size=2,
        even=None,
    )
    loader = dataset.loader(batch_size=1, num_workers=0, collate_fn=keys_of)
    batches = iter(loader)
    assert len(list(islice(batches, 3))) == 3
    state = loader.state_dict()
    batches.close()
    write_indexed(folder, counts)
    daemon.empty()
    loader.load_state_dict(state)
    with pytest.raises(OutdatedError):
        list(loader)
