"""`Mixture`: several datasets as one PyTorch dataset, mixed in proportion."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardcache_client.dataset import ShardDataset
from shardcache_client.mixture_reader import MixtureReader
from shardcache_client.typed import T_co, U

if TYPE_CHECKING:
    from collections.abc import Callable


class Mixture(MixtureReader[T_co], ShardDataset[T_co]):
    """A PyTorch dataset that mixes the samples of several datasets in proportion to their weights.

        web = ShardDataset("s3://bucket/web/index.json", shuffle=True, batch_size=64, decode=decode)
        code = ShardDataset("s3://bucket/code/index.json", shuffle=True, batch_size=64, decode=decode)
        mixture = Mixture({"web": web, "code": code}, weights={"web": 0.8, "code": 0.2})

    It is used as a `ShardDataset` is: with a DataLoader of any number of workers, on any number of ranks, with
    `set_epoch`, `len`, `state_dict` and `load_state_dict`. A sample has the name of its source as `__source__`.

    Over any number of epochs each source has the number of samples that its weights say, exact to half a sample with
    two sources and to one with up to four; `samples_of(epoch)` has the numbers. An epoch spreads them evenly: among any
    consecutive samples of a reader, such as a batch, a source has its proportion, with an error of at most one sample
    if there are two sources, and below four if there are more. Each source keeps its own order and its
    own `shuffle_window`, and is read one round after another: if an epoch takes more than all of its samples, they come
    again in another order; if fewer, the next epoch continues after them. The daemon gets one plan for all sources.

    A state tells of each source, under "sources", where in the sequence of its rounds the epoch starts ("start"), how
    many of its samples the epoch has ("samples"), and how many of these the reader has passed ("passed"; not with
    `global_batch_size`).

    Args:
        sources: datasets by name, or a list of them, whose names are then their numbers; all of them counted. Each
            keeps its urls, `shuffle`, `shuffle_window`, `seed`, `canonical_nodes`, `decode`, `members` and `missing`,
            and what `map` and `filter` have added; all other options must be the same for all, and are the mixture's
            own.
        weights: a weight for each source, by name or in their order; only their ratios count. To change them between
            epochs, give weights by the epoch from which they hold: `{0: {"web": 9, "code": 1}, 5: {"web": 1, "code":
            1}}`. Default: the sizes of the sources, so that an epoch is each sample of each source once.
        samples_per_epoch: samples per epoch over all ranks. Default: as many as all sources together have.

    Raises ConfigError if an argument is invalid, the sources' options differ, or a source is not counted.
    """

    if TYPE_CHECKING:

        def map(self, function: Callable[[T_co], U]) -> Mixture[U]:
            """See `ShardReader.map`."""
