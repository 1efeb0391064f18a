"""Search for the states in an object that a user loads. Pure.

The object is a dataset's state, or any structure that contains states, such as the state of a
StatefulDataLoader. There are two kinds of states:

- Where every sample of an epoch has a number, a `RankState` counts the samples that were read.
- Where samples have no numbers, because they are filtered, uncounted or made by a stage, a
  `StagedState` has the place that a single reader has reached.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from shardcache.shared.exceptions import ConfigError
from shardcache_client.position.rank_state import RankState
from shardcache_client.position.staged_state import StagedState
from shardcache_client.position.state_values import FORMAT_KEY, not_of_one_moment

SavedState: TypeAlias = RankState | StagedState
"""A state of a rank whose samples have numbers, or of a reader whose samples have none."""


def find_states(data: object) -> list[SavedState]:
    """Return the states anywhere in nested dicts and lists, such as a StatefulDataLoader's state.

    Raises ConfigError if there are no states, or if they are not all of one moment.
    """
    try:
        states = [_state_from_json(each) for each in _search(data)]
    except RecursionError as exn:
        raise ConfigError("the state to load is nested too deeply") from exn
    if not states:
        raise ConfigError(
            "the object to load contains no state of a ShardDataset",
            remedy="load the return value of state_dict() of the dataset, or of the loader "
            "around it",
        )
    if len({state.moment for state in states}) > 1:
        raise not_of_one_moment()
    return states


def _state_from_json(data: Mapping[str, Any]) -> SavedState:
    """Return the state that a JSON object describes. Raises ConfigError."""
    if "reader" in data:
        return StagedState.from_json(data)
    return RankState.from_json(data)


def _search(data: object) -> Iterator[Mapping[str, Any]]:
    """Yield the JSON objects of states anywhere in nested mappings and lists. Raises ConfigError.

    Objects within a state are not searched.
    """
    if isinstance(data, Mapping):
        if FORMAT_KEY in data:
            yield data
            return
        # A StatefulDataLoader's state is its last snapshot, and the number of batches since then.
        if data.get("_steps_since_snapshot"):
            raise ConfigError(
                "the loader returned a state that is older than the request for it",
                remedy="use StatefulDataLoader with snapshot_every_n_steps=1, its default",
            )
    for each in _children(data):
        yield from _search(each)


def _children(data: object) -> Sequence[object]:
    """Return the values of a mapping or the items of a list; nothing for any other object."""
    if isinstance(data, Mapping):
        return list(data.values())
    if isinstance(data, str | bytes | bytearray | memoryview | range):
        return ()
    return data if isinstance(data, Sequence) else ()
