"""open_clip's own training, with ShardDataset in place of the stages that list, split, open and shuffle shards.

torchrun --nproc-per-node 8 with_open_clip.py --train-data 's3://bucket/train-{000000..000999}.tar' \
    --train-num-samples 10000000 --dataset-type webdataset …

All of open_clip's options hold, `::` between the urls of several parts included. It counts shards by the pattern alone:
with an index file or a prefix as --train-data, give --dataset-resampled as well. Here, too, every sample comes once
before any comes again.

With --train-data-upsampling-factors, the parts are mixed in proportion to factor times size; each has to be counted:
name its index file.
"""

import sys
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import webdataset as wds
from open_clip_train import data
from open_clip_train.main import main

from shardcache_client.dataset import Mixture, ShardDataset

get_theirs = data.get_wds_dataset


def get_wds_dataset(args: Any, preprocess: Any, is_train: bool, *more: Any, **options: Any) -> data.DataInfo:
    """Return open_clip's loader with other first stages."""
    info = get_theirs(args, preprocess, is_train, *more, **options)
    if is_train:
        samples = training_samples(args)
        info.shared_epoch = SimpleNamespace(set_value=samples.set_epoch)
    else:
        samples = ShardDataset(args.val_data.split("::"), rank=0, world_size=1)  # one rank alone evaluates
    stages = info.dataloader.pipeline[0].dataset.pipeline
    first = next(place for place, stage in enumerate(stages) if getattr(stage, "f", None) is wds.select.f)
    stages[:first] = [partial(filled, samples, 2 * args.batch_size) if is_train else samples]
    return info


def training_samples(args: Any) -> ShardDataset:
    """Return the samples of all parts of --train-data, or a mixture of them by their factors."""
    parts = args.train_data.split("::")
    if args.train_data_upsampling_factors is None:
        return ShardDataset(parts, shuffle=True, seed=args.seed, samples_per_epoch=args.train_num_samples)
    sources = [ShardDataset(part, shuffle=True, seed=args.seed) for part in parts]
    factors = map(float, args.train_data_upsampling_factors.split("::"))
    weights = [
        factor * (source.manifest.samples or 0)  # a Mixture refuses sources that are not counted
        for factor, source in zip(factors, sources, strict=True)
    ]
    return Mixture(sources, weights, samples_per_epoch=args.train_num_samples)


def filled(samples: Iterable[Any], at_hand: int) -> Iterator[Any]:
    """Yield a worker's samples, then the first ones again, as open_clip rounds each worker up to whole batches."""
    first = []
    for number, sample in enumerate(samples):
        if number < at_hand:
            first.append(sample)
        yield sample
    yield from cycle(first)


data.get_wds_dataset = get_wds_dataset

if __name__ == "__main__":
    main(sys.argv[1:])
