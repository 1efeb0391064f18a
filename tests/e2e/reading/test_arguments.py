"""Arguments as users write them: what is accepted, in which form, and the error otherwise."""

import json
from typing import Any

import numpy as np
import pytest
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from shardcache.errors import ConfigError
from shardcache_client.dataset import Mixture, ShardDataset
from shardcache_client.files.paths import cached_paths, open_cached
from shardcache_client.lengths import batch_by_length
from shardcache_client.mixing import MixtureReader
from shardcache_client.reader import ShardReader
from shardcache_client.samples.token_blocks import TokenBlocks
from shardcache_client.webdataset import WebDataset
from support.programs.daemon import Daemon
from support.shards.reading import keys_of

URL = "s3://bucket/train.tar"


def refusal(kind: Any, *args: Any, **options: Any) -> str:
    """Return the error of a call that is refused, with its remedy, without a daemon."""
    with pytest.raises(ConfigError) as caught:
        kind(*args, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("option", "hints"),
    [
        ({"shuffle": 1000}, ["shuffle is 1000", 'True, False or "global"', "shuffle_window"]),
        ({"shuffle": "True"}, ["write shuffle=True, without quotes"]),
        ({"shuffle_window": 2.5}, ["shuffle_window is 2.5", "a whole number, 0 or more"]),
        ({"seed": "a"}, ["seed is 'a'", "None, for a random one"]),
        ({"decode": 5}, ["decode is 5", "rgb8"]),
        ({"missing": "ignore"}, ["missing is 'ignore'", '"error", "skip", or a dict']),
        ({"on_error": "wran"}, ["on_error is 'wran'", "warn_and_continue"]),
        ({"urls": None}, ["urls is None", "a url, a path, or a list of them"]),
        ({"batch_size": "64"}, ["batch_size is '64'", "write batch_size=64, without quotes"]),
        ({"even": "Pad"}, ["even is 'Pad'", '"pad", "drop" or None']),
        ({"global_batch_size": 0}, ["global_batch_size is 0"]),
        (
            {"global_batch_size": 16, "batch_size": 4},
            ["batch_size is 4", "give global_batch_size alone"],
        ),
        ({"global_batch_size": 16, "even": None}, ["same number of samples on every rank"]),
        (
            {"global_batch_size": 16, "canonical_nodes": 3},
            ["cannot be divided among canonical_nodes=3"],
        ),
        ({"tokens": 2048}, ["tokens is 2048", "TokenBlocks(length)"]),
        ({"timeout_s": 0}, ["timeout_s is 0", "above 0"]),
        ({"timeout_s": 10**400}, ["timeout_s is 1000", "above 0"]),
        ({"timeout_s": 10**5000}, ["timeout_s is too large a number"]),
        ({"timeout_s": float("inf")}, ["timeout_s is inf", "at most 1,000,000"]),
        ({"timeout_s": 10**18}, ["timeout_s is 1000", "at most 1,000,000"]),
        ({"seed": 10**5000}, ["seed is too large a number", "at most 256 bits"]),
        ({"decode": {"jpg": 10**5000}}, ["too large a number is not a decoder"]),
        ({"batch_size": 10**30}, ["batch_size is 1000", "at most 2,147,483,647"]),
        ({"global_batch_size": 10**30}, ["global_batch_size is 1000", "at most 2,147,483,647"]),
        ({"shuffle_window": 10**30}, ["shuffle_window is 1000"]),
        ({"samples_per_epoch": 10**30}, ["samples_per_epoch is 1000"]),
        ({"epochs": 10**30}, ["epochs is 1000"]),
        ({"canonical_nodes": 10**30}, ["canonical_nodes is 1000", "at most 1,048,576"]),
        ({"rank": 0, "world_size": 10**30}, ["world_size is 1000", "at most 1,048,576"]),
        ({"job": "x" * 10_000}, ["job is 'xxxx", "a name of 1 to 255 characters"]),
        ({"job": ""}, ["job is ''", "a name of 1 to 255"]),
        ({"job": "\ud800"}, ["job is '"]),
        (
            {"zero_copy": ["zzz"], "members": "jpg"},
            ["zero_copy names the member 'zzz'", "name it in members"],
        ),
        ({"zero_copy": ""}, ["zero_copy is ''"]),
        ({"rank": 3, "world_size": 2}, ["rank 3 is out of range"]),
        ({"rank": 1}, ["rank is 1 and world_size is None"]),
        ({"mesh": DeviceMesh}, ["mesh is <class", "the DeviceMesh itself"]),
        ({"daemon": "mine"}, ["daemon is 'mine'", "private"]),
        ({"daemon": "private", "socket": "s.sock"}, ["omit socket"]),
    ],
)
@pytest.mark.parametrize("kind", [ShardDataset, ShardReader])
def test_wrong_values_are_refused_in_the_name_of_the_class(
    kind: type, option: dict[str, Any], hints: list[str]
) -> None:
    """At construction: class, argument, the value given, and what is accepted."""
    text = refusal(kind, **{"urls": URL} | option)
    assert text.startswith(f"{kind.__name__}: ")
    assert [hint for hint in hints if hint not in text] == []


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("drop_last", 'write even="drop"'),
        ("transform", "write .map(function)"),
        ("shuffel", "did you mean 'shuffle'"),
        ("predownload", "the daemon prefetches"),
        ("num_workers", ".loader(num_workers=...)"),
        ("streams", "Mixture({name: dataset}, weights=...)"),
        ("zzz", "its arguments are urls, shuffle, shuffle_window"),
    ],
)
def test_unknown_words_are_answered_with_ours(word: str, remedy: str) -> None:
    """Words of DataLoader, webdataset, MosaicML Streaming, LitData and datasets, or typos."""
    text = refusal(ShardDataset, URL, **{word: 1})
    assert text.startswith(f"ShardDataset: there is no argument '{word}'")
    assert remedy in text


def test_each_class_and_method_has_its_own_name_in_errors(daemon: Daemon, index: str) -> None:
    """Subclasses and methods are named, and the drop-in names itself, not its dataset."""

    class Mine(ShardDataset):
        pass

    dataset = ShardDataset(index, socket=daemon.socket)
    samples = dataset.indexed()
    for call, args, options, start in (
        (Mine, (URL,), {"batch_size": "x"}, "Mine: batch_size"),
        (ShardDataset, (), {}, "ShardDataset: missing"),
        (ShardDataset, (URL, True), {}, "ShardDataset: too many"),
        (
            WebDataset,
            (URL,),
            {"batch_size": 4, "global_batch_size": 8},
            "WebDataset: batch_size is 4",
        ),
        (dataset.map, (None,), {}, "ShardDataset.map(): function is None"),
        (dataset.select, ("cat",), {}, "ShardDataset.select(): predicate"),
        (dataset.set_epoch, (-1,), {}, "ShardDataset.set_epoch(): epoch is -1"),
        (dataset.loader, (), {"batch_size": "64"}, "ShardDataset.loader(): batch_size is '64'"),
        (samples.split, (0.5, 0.5), {"by": "shard"}, "IndexedShards.split(): by"),
        (samples.subset, ([1.5],), {}, "IndexedShards.subset(): numbers"),
        (cached_paths, (None,), {}, "cached_paths(): urls is None"),
        (open_cached, ("\ud800",), {}, "open_cached(): url is"),
    ):
        assert refusal(call, *args, **options).startswith(start)
    assert "write shardshuffle" in refusal(WebDataset, URL, shuffle=True)
    assert "did you mean 'handler'" in refusal(WebDataset, URL, handlr=None)
    assert "did you mean 'num_workers'" in refusal(dataset.loader, numworkers=2)
    assert "give it to the dataset" in refusal(dataset.loader, seed=2)


@pytest.mark.parametrize("kind", [Mixture, MixtureReader])
def test_wrong_mixtures_are_refused_in_their_name(kind: type, daemon: Daemon, index: str) -> None:
    """A single dataset, weights that fit no source, and arguments that belong to sources."""
    source = ShardDataset(index, socket=daemon.socket)
    for sources in (source, [source, 5], {"a": None}, None, 5):
        assert refusal(kind, sources).startswith(f"{kind.__name__}: sources is")
    assert "the sources are '0', '1'" in refusal(kind, [source, source], weights=[1, 2, 3])
    for weights in (
        0.5,
        "web",
        [1, "x"],
        [1, -1],
        [0, 0],
        [float("nan"), 1],
        [10**400, 1],
        [True, 1],
        {"a": 1},
        {0: [1, 1], 3: 5},
        {3: [1, 1]},
        10**5000,
        [10**5000, 1],
        {0: [1, 1], 10**5000: [1, 2]},
    ):
        assert refusal(kind, [source, source], weights=weights).startswith(f"{kind.__name__}: ")
    assert "give it to each source" in refusal(kind, [source], batch_size=4)
    assert "write weights" in refusal(kind, [source], probabilities=[1])


@pytest.mark.parametrize("kind", [Mixture, MixtureReader])
def test_two_sources_of_one_name_are_refused(kind: type, daemon: Daemon, index: str) -> None:
    """Names are texts, in which 1 and "1" are the same, and one source would be lost."""
    source = ShardDataset(index, socket=daemon.socket)
    assert "sources has two entries named '1'" in refusal(kind, {1: source, "1": source})
    assert "weights has two entries named '1'" in refusal(
        kind, [source, source], weights={0: 1, 1: 2, "1": 3}
    )


@pytest.mark.parametrize("epoch", [1.5, True, "1", -1, None])
def test_weights_from_what_is_no_epoch_are_refused(epoch: Any, daemon: Daemon, index: str) -> None:
    """Neither rounded nor taken for a number: the error shows what was given."""
    source = ShardDataset(index, socket=daemon.socket)
    text = refusal(Mixture, [source, source], weights={0: [1, 1], epoch: [1, 3]})
    assert f"weights has {epoch!r}" in text


def test_a_mixture_of_a_list_names_its_sources_by_number(daemon: Daemon, index: str) -> None:
    """Weights may be a list, an array or a dict by number, and may change by epoch."""
    source = ShardDataset(index, socket=daemon.socket)
    named = Mixture({"0": source, "1": source}, {"0": 0.75, "1": 0.25}, samples_per_epoch=40)
    for weights in (
        [0.75, 0.25],
        (3, 1),
        np.array([0.75, 0.25], dtype=np.float32),
        {0: 3, 1: np.int8(1)},
    ):
        mixture = Mixture([source, source], weights, samples_per_epoch=40)
        assert mixture.samples_of(0) == {"0": 30, "1": 10}
        assert mixture.state_dict() == named.state_dict()
    assert {sample["__source__"] for sample in named} == {"0", "1"}
    changing = Mixture(
        [source, source], {0: [1, 0], np.int64(2): [0, 1]}, samples_per_epoch=np.int32(40)
    )
    assert [changing.samples_of(epoch) for epoch in (1, np.int64(2))] == [
        {"0": 40, "1": 0},
        {"0": 0, "1": 40},
    ]


def test_numbers_of_numpy_give_the_same_state(daemon: Daemon, index: str) -> None:
    """Sizes, seed, ranks and epochs become Python's ints, from any width, float or array."""
    plain = {
        "shuffle": True,
        "shuffle_window": 3,
        "seed": 7,
        "samples_per_epoch": 90,
        "epochs": 5,
        "batch_size": 4,
    }
    plain |= {"rank": 1, "world_size": 2, "canonical_nodes": 2, "timeout_s": 300}
    states = []
    for number in (int, np.int64, np.uint8, np.float32, np.array, float):
        options = {
            name: np.bool_(value) if value is True else number(min(value, 200))
            for name, value in plain.items()
        }
        dataset = ShardDataset(index, socket=daemon.socket, **options)
        dataset.set_epoch(number(3))
        states.append(json.dumps([dataset.state_dict(), dataset.seed]))
    assert len(set(states)) == 1
    assert [
        repr(TokenBlocks(number(8), overlap=number(1), end=number(0)))
        for number in (np.int64, np.float64)
    ] == [repr(TokenBlocks(8, overlap=1, end=0))] * 2


def test_samples_by_number_are_found_in_indexed(daemon: Daemon, index: str) -> None:
    """A TypeError says so. Loops, membership and loaders iterate as ever, without a map."""
    dataset = ShardDataset(index, socket=daemon.socket)
    for wrong, remedy in ((0, r"\.indexed\(\)\[0\]"), (slice(10), r"\.subset\(range\(0, 10\)\)")):
        for kind in (dataset, ShardReader(index, socket=daemon.socket)):
            with pytest.raises(TypeError, match=remedy):
                kind[wrong]
    assert (
        len(list(dataset))
        == sum(len(batch["__key__"]) for batch in DataLoader(dataset, batch_size=8))
        == 200
    )


def random_dataset(daemon: Daemon, index: str, **options: Any) -> ShardDataset:
    """Return a shuffled dataset whose seed is drawn."""
    return ShardDataset(
        index, **{"shuffle": True, "seed": None, "batch_size": 5, "socket": daemon.socket} | options
    )


def test_seed_none_is_random_and_kept_in_states(
    daemon: Daemon, index: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged once and differs from run to run, and a resumed run takes it."""
    first = random_dataset(daemon, index)
    other = random_dataset(daemon, index)
    assert first.seed != other.seed
    assert [
        f"seed={each.seed} " in record.message
        for each, record in zip((first, other), caplog.records, strict=True)
    ]
    keys = keys_of(random_dataset(daemon, index, seed=first.seed))
    samples = iter(first)
    assert [next(samples)["__key__"] for _ in range(60)] == keys[:60]
    other.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert other.seed == first.seed
    assert keys_of(other) == keys[60:]
    second = keys_of(other)
    first.set_epoch(1)
    assert second == keys_of(first) != keys
    with pytest.raises(ConfigError, match="another dataset"):
        random_dataset(daemon, index, seed=5).load_state_dict(first.state_dict())


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"batch_size": 10**30}, "batch_size is 1000"),
        ({"in_order": "x"}, "in_order is 'x'"),
        ({"num_workers": 10**30}, "num_workers is 1000"),
        ({"num_workers": 1, "prefetch_factor": 10**30}, "prefetch_factor is 1000"),
        ({"timeout": -1}, "timeout is -1"),
        ({"timeout": "x"}, "timeout is 'x'"),
        ({"worker_init_fn": 3}, "worker_init_fn is 3"),
        (
            {"num_workers": 1, "multiprocessing_context": "zz"},
            "multiprocessing_context option should specify a valid",
        ),
        (
            {"num_workers": 0, "prefetch_factor": 2},
            "prefetch_factor option could only be specified",
        ),
    ],
)
def test_loaders_refuse_values_when_they_are_made(
    options: dict[str, Any], hint: str, daemon: Daemon, index: str
) -> None:
    """Ours and those of torch's DataLoader, which a worker would otherwise trip over, or nobody."""
    assert hint in refusal(ShardDataset(index, socket=daemon.socket).loader, **options)


@pytest.mark.parametrize("refused", ["dataset", "sampler", "batch_sampler", "shuffle"])
def test_the_list_of_a_loaders_arguments_has_none_that_it_refuses(
    refused: str, daemon: Daemon, index: str
) -> None:
    """Those of a DataLoader that are about the order."""
    loader = ShardDataset(index, socket=daemon.socket).loader
    listed = refusal(loader, zzz=1).partition("its arguments are ")[2].split(", ")
    assert len(listed) == len({*listed})
    assert "in_order" in listed
    assert refused not in listed
    assert refused in refusal(loader, **{refused: [1]})


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (3, "write .indexed()[3]"),
        (slice(4), "write .subset(range(0, 4))"),
        (slice(5, None), "write .subset(range(5, 200))"),
        (slice(-3, None), "write .subset(range(197, 200))"),
        (slice(0, 9, 2), "write .subset(range(0, 9, 2))"),
    ],
)
def test_samples_by_number_are_refused_with_what_to_write(
    daemon: Daemon, index: str, number: Any, remedy: str
) -> None:
    """Of a slice, the numbers that it means."""
    dataset: Any = ShardDataset(index, socket=daemon.socket)
    with pytest.raises(TypeError) as raised:
        dataset[number]
    assert str(raised.value).endswith(remedy)


def test_samples_beyond_any_number_are_out_of_range(daemon: Daemon, index: str) -> None:
    """With thousands of digits, too, which no message can show."""
    dataset = ShardDataset(index, socket=daemon.socket)
    for number in (200, 10**5000):
        with pytest.raises(IndexError, match="of a dataset with 200 samples"):
            dataset.subset([number])
        with pytest.raises(IndexError, match="of a dataset with 200 samples"):
            dataset.indexed()[number]


def test_epochs_beyond_any_number_are_refused(daemon: Daemon, index: str) -> None:
    """By the dataset and by its loader, before a worker is told."""
    dataset = ShardDataset(index, socket=daemon.socket)
    assert "epoch is 1000" in refusal(dataset.set_epoch, 10**30)
    assert "epoch is 1000" in refusal(dataset.loader(num_workers=0).set_epoch, 10**30)


def test_a_global_batch_larger_than_the_epoch_is_named(daemon: Daemon, index: str) -> None:
    """The number of ranks has nothing to do with it."""
    dataset = ShardDataset(index, global_batch_size=1000, even="drop", socket=daemon.socket)
    text = refusal(list, dataset)
    assert "global_batch_size=1000 is larger than an epoch of 200 samples" in text
    assert "a smaller global_batch_size" in text


def test_a_refused_state_leaves_a_dataset_its_own_seed(daemon: Daemon, index: str) -> None:
    """A program that goes on without the state would otherwise not train as its log says."""
    dataset = random_dataset(daemon, index, shuffle_window=2)
    own = keys_of(random_dataset(daemon, index, shuffle_window=2, seed=dataset.seed))
    with pytest.raises(ConfigError, match="another dataset"):
        dataset.load_state_dict(random_dataset(daemon, index).state_dict())
    assert keys_of(dataset) == own


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, pytest.param({"global_batch_size": 5, "batch_size": 1}, marks=pytest.mark.slow)]
)
def test_running_workers_take_the_seed_of_a_loaded_state(
    daemon: Daemon, index: str, options: dict[str, int]
) -> None:
    """A loader with persistent workers continues another run and its later epochs."""
    saved, resumed = (random_dataset(daemon, index, **options) for _ in range(2))
    saving = saved.loader(num_workers=2, collate_fn=keys_of)
    loader: Any = DataLoader(
        resumed, batch_size=5, num_workers=2, collate_fn=keys_of, persistent_workers=True
    )
    batches = iter(saving)
    for _ in range(7):
        next(batches)
    assert len(list(loader)) == 40
    resumed.load_state_dict(saving.state_dict())
    # A plain loader resumes with its first worker, whosever turn it was.
    assert sorted(loader) == sorted(batches)
    assert list(loader) == list(saving)


def test_a_mixtures_random_seeds_are_kept_by_source(daemon: Daemon, index: str) -> None:
    """A source with a seed of its own keeps it; the others take the saved run's."""
    runs = [
        Mixture(
            [
                random_dataset(daemon, index),
                random_dataset(daemon, index, seed=3),
                random_dataset(daemon, index),
            ]
        )
        for _ in range(2)
    ]
    samples = iter(runs[0])
    for _ in range(100):
        next(samples)
    state = runs[0].state_dict()
    assert set(state["seeds"]) == {"0", "2"}
    runs[1].load_state_dict(state)
    assert keys_of(runs[1]) == keys_of(samples)


@pytest.mark.parametrize("kind", [ShardDataset, ShardReader])
def test_ranks_that_share_nothing_cannot_draw_a_seed(
    kind: type, daemon: Daemon, index: str
) -> None:
    """Each would draw another; a single rank, named or not, may."""
    options: dict[str, Any] = {"shuffle": True, "seed": None, "socket": daemon.socket}
    assert "give a seed" in refusal(kind, index, **options, rank=1, world_size=2)
    assert kind(index, **options, rank=0, world_size=1).seed >= 0


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"num_workers": 10**6}, "at most 4,096"),
        ({"generator": 5}, "a torch.Generator"),
        ({"timeout": float("inf")}, "0 for no limit, at most 1,000,000"),
        ({"timeout": 1e10}, "0 for no limit, at most 1,000,000"),
        ({"timeout": False}, "give a number of seconds"),
        ({"timeout": None}, "give a number of seconds"),
        ({"timeout": ""}, "give a number of seconds"),
        ({"pin_memory_device": 5}, "pin_memory_device is 5"),
        ({"sampler": np.arange(2)}, "does not take sampler"),
        ({"batch_sampler": []}, "does not take batch_sampler"),
    ],
)
def test_wrong_options_of_a_loader_are_refused(
    daemon: Daemon, index: str, options: dict[str, Any], hint: str
) -> None:
    """By our own words, when the loader is made."""
    text = refusal(ShardDataset(index, socket=daemon.socket).loader, **options)
    assert text.startswith("ShardDataset.loader(): ")
    assert hint in text


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"urls": 5}, "give a url, a path, or a list of them"),
        ({"urls": [1]}, "give a url, a path, or a list of them"),
        ({"mode": np.arange(2)}, "give a string"),
        ({"shardshuffle": np.arange(2)}, "give True, False, or a number of shards"),
        ({"select_files": 5}, "give a function"),
        ({"cache_size": "10GB"}, "give a number of bytes"),
    ],
)
def test_wrong_options_of_a_webdataset_are_refused(
    options: dict[str, Any], hint: str, index: str
) -> None:
    """The constructor refuses them, also those that have no effect but are compared."""
    text = refusal(WebDataset, **{"urls": index} | options)
    assert text.startswith("WebDataset: ")
    assert hint in text


def test_batches_by_length_are_of_a_dataset() -> None:
    """A number in place of the dataset is refused with the names of both classes."""
    assert "give a ShardDataset or Mixture" in refusal(
        batch_by_length, 5, max_tokens=10, length=len
    )


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"member": 5}, "member is 5"),
        ({"dtype": 16}, "dtype is 16"),
        ({"dtype": "uint16", "end": 70_000}, "the end token 70000 is too large for uint16"),
        ({"dtype": "int16", "end": 1 << 15}, "the end token 32768 is too large for int16"),
    ],
)
def test_wrong_token_blocks_are_refused(options: dict[str, Any], hint: str) -> None:
    """The constructor refuses them, as far as it knows the type of the tokens."""
    assert hint in refusal(TokenBlocks, 8, **options)
