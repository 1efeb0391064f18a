"""timm's reader of webdataset shards, with ShardDataset in place of the stages that list, split, open and shuffle them.

Import this before timm makes its datasets, as the first line of its train.py, say. Its options for shards hold:

python train.py --dataset wds/ --data-dir s3://bucket/imagenet --train-split 'train-{0000..1023}.tar|1281167' …
"""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import cycle
from typing import Any

import webdataset as wds
from timm.data.readers import reader_wds

from shardcache_client.dataset import ShardDataset


class ShardReader(reader_wds.ReaderWds):
    """timm's reader with other first stages."""

    def set_loader_cfg(self, num_workers: int | None = None) -> None:
        """Make the dataset, once timm says how many workers will read it."""
        super().set_loader_cfg(num_workers)
        self.samples = ShardDataset(
            [f"{self.root}/{name}" for name in self.split_info.filenames],
            shuffle=self.is_training,
            seed=self.common_seed,
            samples_per_epoch=self.num_samples if self.is_training else None,
        )

    def set_epoch(self, count: int) -> None:
        """Choose the epoch that is read next."""
        super().set_epoch(count)
        self.samples.set_epoch(count)

    def _lazy_init(self) -> None:
        super()._lazy_init()
        stages = self.ds.pipeline
        first = next(place for place, stage in enumerate(stages) if getattr(stage, "f", None) is wds.map.f)
        stages[:first] = [partial(filled, self.samples, 2 * self.batch_size) if self.is_training else self.samples]


def filled(samples: Iterable[Any], at_hand: int) -> Iterator[Any]:
    """Yield a worker's samples, then the first ones again, as timm rounds each worker up to whole batches."""
    first = []
    for number, sample in enumerate(samples):
        if number < at_hand:
            first.append(sample)
        yield sample
    yield from cycle(first)


reader_wds.ReaderWds = ShardReader
