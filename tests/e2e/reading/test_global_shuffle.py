"""`shuffle="global"`: a permutation of all samples, each fetched by its range, ahead of need."""

import json
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from shardcache.errors import ConfigError
from shardcache_client.dataset import Joined, Mixture, ShardDataset
from shardcache_client.reader import ShardReader
from shardcache_client.samples.token_blocks import TokenBlocks
from support.programs.cli import shardcache
from support.programs.daemon import Daemon, eventually
from support.shards.reading import keys_of
from support.shards.tars import make_tar, random_samples
from support.stores.canary import Canary

KIB = 1024
PART_BYTES = 64 * KIB
COUNTS = (17, 30, 0, 9, 24)
SIZES = {"jpg": 40 * KIB, "cls": 2}
TOTAL = sum(COUNTS)
SAMPLES = [
    random_samples(count, SIZES, first=sum(COUNTS[:number])) for number, count in enumerate(COUNTS)
]
ALL: list[Any] = list(chain.from_iterable(SAMPLES))
KEYS = [sample["__key__"] for sample in ALL]
BATCH = 8

Make = Callable[..., ShardDataset]


@pytest.fixture(scope="module")
def store() -> Iterator[Canary]:
    """Shards, and with the daemon's help their index and table."""
    with Canary() as running:
        for number, samples in enumerate(SAMPLES):
            running.files[f"/{number}.tar"] = make_tar(samples)
        yield running


@pytest.fixture(scope="module")
def files(store: Canary, folder: Path) -> str:
    """The url of an index with a table of samples."""
    urls = [store.url(f"/{number}.tar") for number in range(len(COUNTS))]
    (folder / "indexing").mkdir()
    with Daemon(folder / "indexing") as daemon:
        ran = shardcache(
            "index", *urls, "-o", folder / "index.json", "--samples", socket=daemon.socket
        )
    assert ran.code == 0, ran.err
    for name in ("index.json", "index.samples"):
        store.files[f"/{name}"] = (folder / name).read_bytes()
    return store.url("/index.json")


@pytest.fixture(scope="module")
def node(folder: Path) -> Iterator[Daemon]:
    """A daemon whose parts are a sample or two."""
    with Daemon(folder, "--range-part-size", str(PART_BYTES), "--listing-ttl-s", "1000") as running:
        yield running


@pytest.fixture
def make(node: Daemon, files: str) -> Make:
    """A function that makes the dataset, in a process of a job."""

    def make_dataset(url: str = files, **options: Any) -> ShardDataset:
        chosen = {"shuffle": "global", "seed": 7, "batch_size": BATCH, "socket": node.socket}
        return ShardDataset(url, **chosen | options)

    return make_dataset


def content(samples: Any) -> list[dict[str, Any]]:
    """Return samples without their urls, sorted by key."""
    plain = [{name: value for name, value in each.items() if name != "__url__"} for each in samples]
    return sorted(plain, key=lambda each: str(each["__key__"]))


def test_each_sample_comes_once_in_an_order_of_all(make: Make) -> None:
    """Byte for byte; another epoch has another order, and the first batch is of several shards."""
    dataset = make()
    first = list(dataset)
    second = list(dataset)

    assert content(first) == ALL
    assert content(second) == ALL
    assert keys_of(first) != keys_of(second)
    assert len({sample["__url__"] for sample in first[:BATCH]}) > 2
    assert len(dataset) == TOTAL


def test_samples_are_fetched_by_their_ranges(store: Canary, files: str, tmp_path: Path) -> None:
    """A batch costs the parts of its samples, a whole pass each byte once, a second nothing."""
    flags = (
        "--range-part-size",
        str(PART_BYTES),
        "--whole-from-percent",
        "100",
        "--listing-ttl-s",
        "1000",
    )
    with Daemon(tmp_path, *flags) as daemon:
        dataset = ShardDataset(files, shuffle="global", socket=daemon.socket)
        store.requests.clear()
        list(islice(dataset, 1))
        assert 0 < store.asked_bytes(".tar") < sum(map(len, map(make_tar, SAMPLES)))

        list(dataset)
        once = store.asked_bytes(".tar")
        list(dataset)
        assert store.asked_bytes(".tar") == once
        eventually(lambda: daemon.leases() == 0)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 0},
        {"num_workers": 2},
        {"num_workers": 2, "workers": "threads"},
        pytest.param(
            {"num_workers": 2, "multiprocessing_context": "spawn"}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_any_workers_give_the_same_batches_and_resume_with_the_next(
    make: Make, options: dict[str, Any]
) -> None:
    """As with a window: a state of any batch, for any workers."""
    alone = list(make())
    batches = [alone[start : start + BATCH] for start in range(0, TOTAL, BATCH)]
    loader = make().loader(collate_fn=list, **options)
    given = iter(loader)
    assert list(islice(given, 4)) == batches[:4]

    resumed = make().loader(collate_fn=list, **options)
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert list(resumed) == batches[4:]


@pytest.mark.slow
def test_plain_dataloader_gives_the_same_batches(make: Make) -> None:
    """Its workers give the batches in turn."""
    alone = list(make())
    loader = DataLoader(make(), batch_size=BATCH, num_workers=2, collate_fn=list)
    assert list(chain.from_iterable(loader)) == alone


def test_reader_without_torch_gives_the_same_samples(make: Make, node: Daemon, files: str) -> None:
    """And reads states of the dataset."""
    dataset = make()
    alone = list(dataset)
    reader = ShardReader[Any](files, shuffle="global", seed=7, batch_size=BATCH, socket=node.socket)
    assert list(reader) == alone


def test_other_ranks_read_the_rest_once(make: Make) -> None:
    """Two ranks, then three: each sample once over both, then an epoch that is whole again."""
    read: list[str] = []
    states = []
    for rank in range(2):
        loader = make(rank=rank, world_size=2, even=None).loader(num_workers=0, collate_fn=list)
        batches = iter(loader)
        read += keys_of(chain.from_iterable(islice(batches, 2)))
        states.append(loader.state_dict())
    for rank in range(3):
        loader = make(rank=rank, world_size=3, even=None, batch_size=5).loader(
            num_workers=0, collate_fn=list
        )
        loader.load_state_dict(states)
        read += keys_of(chain.from_iterable(loader))
    assert sorted(read) == KEYS


def test_global_batches_are_the_same_on_any_ranks(make: Make) -> None:
    """A global permutation in global batches: the parts of two ranks are those of one."""

    def batches(ranks: int) -> list[list[str]]:
        of_ranks = [
            make(
                batch_size=1, global_batch_size=8, canonical_nodes=2, rank=rank, world_size=ranks
            ).loader(num_workers=0, collate_fn=keys_of)
            for rank in range(ranks)
        ]
        return [list(chain.from_iterable(parts)) for parts in zip(*of_ranks, strict=True)]

    assert batches(1) == batches(2)


def test_selection_is_permuted_alone(make: Make) -> None:
    """Every third sample, each once."""
    chosen = range(0, TOTAL, 3)
    assert sorted(keys_of(make().subset(chosen))) == [KEYS[number] for number in chosen]


def test_members_and_decoders_are_those_of_any_dataset(make: Make) -> None:
    """One member alone, decoded."""
    dataset = make(members=("cls",), decode=lambda sample: (sample["__key__"], sample["cls"]))
    assert sorted(dataset) == [(sample["__key__"], sample["cls"]) for sample in ALL]


@pytest.mark.slow
def test_source_of_a_mixture_may_be_permuted_beside_one_with_a_window(make: Make) -> None:
    """Each sample of both comes once in an epoch, with the name of its source."""
    mixture = Mixture({"all": make(), "window": make(shuffle=True)})
    for samples in (
        list(mixture),
        list(chain.from_iterable(mixture.loader(num_workers=2, collate_fn=list))),
    ):
        for name in ("all", "window"):
            assert sorted(each["__key__"] for each in samples if each["__source__"] == name) == KEYS


def test_mixture_of_permuted_sources_gives_each_sample_once(make: Make) -> None:
    """Two of the same shards, with seeds of their own."""
    mixture = Mixture([make(), make(seed=8)])
    samples = list(mixture)
    assert sorted(keys_of(samples)) == sorted(KEYS * 2)


def test_filtered_samples_resume_with_exactly_the_rest(make: Make) -> None:
    """A filter leaves samples without numbers: states count places."""
    dataset = make(even=None).filter(lambda sample: int(sample["__key__"]) % 2)
    whole = keys_of(dataset)
    interrupted = make(even=None).filter(lambda sample: int(sample["__key__"]) % 2)
    samples = iter(interrupted)
    taken = keys_of(islice(samples, 13))
    resumed = make(even=None).filter(lambda sample: int(sample["__key__"]) % 2)
    resumed.load_state_dict(interrupted.state_dict())
    assert sorted(whole) == [key for key in KEYS if int(key) % 2]
    assert taken + keys_of(resumed) == whole


def test_sample_that_is_skipped_is_replaced_by_another(make: Make) -> None:
    """In its own batch, which depends on its place alone."""

    def decode(sample: dict[str, Any]) -> str:
        if sample["__key__"] == KEYS[3]:
            raise ValueError
        return str(sample["__key__"])

    dataset = make(decode=decode, on_error="ignore_and_continue")
    found = list(dataset)
    assert len(found) == TOTAL
    assert set(found) == set(KEYS) - {KEYS[3]}


@pytest.mark.slow
def test_daemon_that_restarts_loses_no_sample(files: str, tmp_path: Path) -> None:
    """In the middle of an epoch, with samples requested ahead."""
    flags = ("--range-part-size", str(PART_BYTES))
    with Daemon(tmp_path, *flags) as daemon:
        dataset = ShardDataset(files, shuffle="global", socket=daemon.socket)
        samples = iter(dataset)
        found = list(islice(samples, 20))
        daemon.kill()
        daemon.start()
        found += samples
        assert content(found) == ALL


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shuffle_window": 8}, "has no window"),
        ({"canonical_nodes": 2}, "no groups"),
        ({"tokens": TokenBlocks(16)}, "blocks of tokens have none"),
        ({"zero_copy": True}, "zero_copy maps whole shards"),
        ({"shuffle": "globally"}, "shuffle"),
    ],
    ids=str,
)
def test_options_without_a_meaning_are_refused(
    make: Make, options: dict[str, Any], message: str
) -> None:
    """Each says what to write instead."""
    with pytest.raises(ConfigError, match=message) as caught:
        make(**options)
    assert caught.value.remedy


def test_join_of_permuted_samples_is_refused(make: Make) -> None:
    """Its shards are read together."""
    with pytest.raises(ConfigError, match="a join reads the shards"):
        Joined({"": make(), "other": make(shuffle=False)})


def test_dataset_without_a_table_is_refused(make: Make, store: Canary) -> None:
    """The error has the command that writes one."""
    counted = store.url("/{0..1}.tar")
    list(make(counted, shuffle=False))
    with pytest.raises(ConfigError, match="next to the index file") as caught:
        make(counted)
    assert "--samples" in caught.value.remedy

    store.files["/alone.json"] = store.files["/index.json"]
    with pytest.raises(ConfigError, match="no table of samples") as caught:
        list(make(store.url("/alone.json")))
    assert "--samples" in caught.value.remedy


def test_uncounted_shards_are_refused(make: Make, folder: Path) -> None:
    """Before the first sample."""
    (folder / "one.tar").write_bytes(make_tar(SAMPLES[0]))
    with pytest.raises(ConfigError, match="never counted") as caught:
        make(f"file://{folder}/one.tar")
    assert "--samples" in caught.value.remedy
