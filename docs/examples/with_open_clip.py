"""open_clip's own training, with ShardDataset in place of the stages that list, split, open and shuffle shards.

torchrun --nproc-per-node 8 with_open_clip.py --train-data 's3://bucket/train-{000000..000999}.tar' \
    --train-num-samples 10000000 --dataset-type webdataset …

All of open_clip's options hold. It counts shards by the pattern alone: with an index file or a prefix as --train-data,
give --dataset-resampled as well. Here, too, every sample comes once before any comes again.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import webdataset as wds
from open_clip_train import data
from open_clip_train.main import main

from shardcache_client import ShardDataset

get_theirs = data.get_wds_dataset


def get_wds_dataset(args: Any, preprocess: Any, is_train: bool, *more: Any, **options: Any) -> data.DataInfo:
    """Return open_clip's loader with other first stages."""
    info = get_theirs(args, preprocess, is_train, *more, **options)
    if is_train:
        samples = ShardDataset(
            args.train_data,
            shuffle=True,
            seed=args.seed,
            batch_size=args.batch_size,
            samples_per_epoch=info.dataloader.num_samples,  # whole batches, as many on each rank and worker
        )
        info.shared_epoch = SimpleNamespace(set_value=samples.set_epoch)
    else:
        samples = ShardDataset(args.val_data, rank=0, world_size=1)  # one rank alone evaluates
    stages = info.dataloader.pipeline[0].dataset.pipeline
    first = next(place for place, stage in enumerate(stages) if getattr(stage, "f", None) is wds.select.f)
    stages[:first] = [samples]
    return info


data.get_wds_dataset = get_wds_dataset

if __name__ == "__main__":
    main(sys.argv[1:])
