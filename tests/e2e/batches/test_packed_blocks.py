"""Blocks of whole samples over a real daemon: bounded, alike for any workers, resumed exactly."""

import json
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shardcache.errors import ConfigError
from shardcache_client.dataset import Mixture, ShardDataset
from support.cases import first_quick
from support.programs.daemon import Daemon
from support.programs.ranks import torchrun
from support.shards.tars import KEYS, Make

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

MAX_TOKENS = 40
KINDS: list[dict[str, Any]] = [
    {"num_workers": 0},
    {"num_workers": 3, "workers": "threads"},
    {"num_workers": 2, "persistent_workers": False},
]


def tokens(sample: dict[str, Any]) -> Any:
    """Return between 1 and 17 tokens, which the key determines."""
    number = int(sample["__key__"])
    return np.full(1 + number * 7 % 17, number)


def packed(dataset: ShardDataset[Any]) -> ShardDataset[Any]:
    """Return blocks of the dataset's samples."""
    return dataset.pack(MAX_TOKENS, tokens=tokens, window=12)


def keys(blocks: Any) -> list[list[str]]:
    """Return the keys of each block."""
    return [[sample["__key__"] for sample in block["samples"]] for block in blocks]


def test_blocks_have_what_attention_takes(make: Make) -> None:
    """Each sample once, whole, and at the place that the offsets say."""
    blocks = list(packed(make()).loader(num_workers=0))
    assert sorted(chain(*keys(blocks))) == KEYS
    for block in blocks:
        lengths = [len(tokens(sample)) for sample in block["samples"]]
        assert sum(lengths) <= MAX_TOKENS
        assert block["cu_seqlens"].dtype == block["positions"].dtype == torch.int32
        assert block["cu_seqlens"].diff().tolist() == lengths
        assert block["positions"].tolist() == [
            place for length in lengths for place in range(length)
        ]
        assert block["max_seqlen"] == max(lengths)
        assert block["tokens"].tolist() == [
            each for sample in block["samples"] for each in tokens(sample)
        ]


@pytest.mark.parametrize("kind", KINDS[1:])
def test_blocks_are_the_same_for_any_workers(make: Make, kind: dict[str, Any]) -> None:
    """Two epochs, of different orders."""
    alone = packed(make()).loader(num_workers=0)
    others = packed(make()).loader(**kind)
    first = [keys(alone), keys(alone)]
    assert [keys(others), keys(others)] == first
    assert first[0] != first[1]


@pytest.mark.parametrize("kind", first_quick(KINDS[:3]))
def test_packed_epoch_resumes_with_the_very_next_block(make: Make, kind: dict[str, Any]) -> None:
    """After each number of blocks, from a state of a few numbers."""
    whole = keys(packed(make()).loader(num_workers=0))
    for taken in range(1, len(whole)):
        loader = packed(make()).loader(**kind)
        iterator = iter(loader)
        begun = keys(islice(iterator, taken))
        state = json.dumps(loader.state_dict())
        assert len(state) < 400
        resumed = packed(make()).loader(num_workers=0)
        resumed.load_state_dict(json.loads(state))
        assert begun + keys(resumed) == whole


def test_several_blocks_come_as_a_list(make: Make) -> None:
    """As their shapes differ."""
    whole = keys(packed(make()).loader(num_workers=0))
    assert [keys(batch) for batch in packed(make()).loader(batch_size=2, num_workers=0)] == [
        whole[at : at + 2] for at in range(0, len(whole), 2)
    ]


def test_mixtures_and_filtered_samples_are_packed(make: Make) -> None:
    """Each sample that is left, once."""
    sources = {
        "even": make().subset(range(0, len(KEYS), 2)),
        "odd": make().subset(range(1, len(KEYS), 2)),
    }
    mixture = Mixture(sources).filter(lambda sample: int(sample["__key__"]) % 3 > 0)
    assert sorted(chain(*keys(packed(mixture).loader(num_workers=0)))) == [
        key for key in KEYS if int(key) % 3
    ]


@pytest.mark.parametrize("kind", first_quick(KINDS[:3]))
def test_blocks_per_source_have_one_source_and_resume_exactly(
    make: Make, kind: dict[str, Any]
) -> None:
    """Each names it; after any number of blocks, a state continues with the very next one."""
    sources = {
        "even": make().subset(range(0, len(KEYS), 2)),
        "odd": make().subset(range(1, len(KEYS), 2)),
    }

    def blocks() -> ShardDataset[Any]:
        return Mixture(sources).pack(MAX_TOKENS, tokens=tokens, window=24, per_source=True)

    loader = blocks().loader(**kind)
    whole = [*loader]

    for block in whole:
        assert {sample["__source__"] for sample in block["samples"]} == {block["source"]}
    assert sorted(chain(*keys(whole))) == KEYS

    loader = blocks().loader(**kind)
    assert len([*islice(loader, 3)]) == 3
    other = blocks().loader(num_workers=0)
    other.load_state_dict(loader.state_dict())
    assert keys(other) == keys(whole)[3:]


def test_blocks_per_source_need_the_name_of_the_source(make: Make) -> None:
    """A dataset that is no mixture has none, nor has a sample of which map keeps nothing."""
    with pytest.raises(ConfigError, match="__source__"):
        next(iter(make().pack(MAX_TOKENS, tokens=tokens, per_source=True)))


@pytest.mark.parametrize(
    "after",
    [
        lambda blocks: blocks.map(len),
        lambda blocks: blocks.filter(len),
        lambda blocks: blocks.subset(range(3)),
        lambda blocks: blocks.indexed(),
        lambda blocks: packed(blocks),
        lambda blocks: Mixture({"a": blocks}),
    ],
)
def test_operations_on_samples_come_before_packing(make: Make, after: Any) -> None:
    """Applied to blocks, they would silently be applied to samples."""
    with pytest.raises(ConfigError, match="groups of"):
        after(packed(make()))


def read_as_rank(socket: str, urls: str) -> dict[str, Any]:
    """Be one rank of filtered samples: read an epoch, begin another, and resume that."""
    dist.init_process_group("gloo")

    def blocks() -> ShardDataset[Any]:
        dataset = ShardDataset(
            urls, shuffle=True, shuffle_window=3, seed=7, socket=socket, job="packing-job"
        )
        return packed(dataset.filter(is_kept))

    loader = blocks().loader(num_workers=0)
    begun = keys(loader)
    iterator = iter(loader)
    begun_again = keys(islice(iterator, 3))
    state = loader.state_dict()
    resumed = blocks().loader(num_workers=1)
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, state)
    resumed.load_state_dict(states)
    return {
        "whole": begun,
        "begun": begun_again,
        "left": keys(iterator),
        "rest": keys(resumed),
        "state": state,
    }


def is_kept(sample: dict[str, Any]) -> bool:
    """Return True for two samples of three."""
    return int(sample["__key__"]) % 3 > 0


@pytest.mark.slow
def test_ranks_get_equally_many_blocks_and_resume_exactly(
    daemon: Daemon, train: str, make: Make
) -> None:
    """Two ranks, from the states of both; and what they have left is read once by a single one."""
    ranks = torchrun(read_as_rank, daemon.socket, train)
    assert len({len(rank["whole"]) for rank in ranks}) == 1
    assert {key for rank in ranks for key in chain(*rank["whole"])} == {
        key for key in KEYS if int(key) % 3
    }
    assert [rank["rest"] for rank in ranks] == [rank["left"] for rank in ranks]

    alone = packed(make().filter(is_kept)).loader(num_workers=0)
    alone.load_state_dict([rank["state"] for rank in ranks])
    begun = {key for rank in ranks for key in chain(*rank["begun"])}
    rest = list(chain(*keys(alone)))
    assert sorted(rest) == sorted({key for key in KEYS if int(key) % 3} - begun)
