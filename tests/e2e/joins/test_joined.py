"""Datasets whose members are in tars of their own, joined by key and read from a real daemon."""

import json
import pickle
import shutil
from collections import Counter
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from shardcache.errors import (
    ConfigError,
    DecodeError,
    SampleError,
)
from shardcache_client.dataset import Joined, Mixture, ShardDataset
from shardcache_client.joining import JoinedReader
from shardcache_client.reader import ShardReader
from shardcache_client.sharing.buffer import Buffer
from support.cases import first_quick
from support.programs.daemon import Daemon, eventually
from support.shards.joined import (
    CAPTIONS,
    COUNTS,
    EXPECTED,
    IMAGES,
    KEYS,
    SHUFFLE,
    TOTAL,
    Make,
    members,
    write,
)
from support.shards.reading import keys_of
from support.shards.tables import recut
from support.shards.tars import Sample, make_tar, random_samples


@pytest.mark.parametrize("options", [{}, SHUFFLE, {"shuffle": True, "shuffle_window": 0}], ids=str)
def test_joined_samples_are_those_of_the_first_source(
    make: Make, indexes: dict[str, str], daemon: Daemon, options: dict[str, Any]
) -> None:
    """Order, url and length are its own, and members come from the shards beside by key."""
    joined = pickle.loads(pickle.dumps(make(**options)))
    images = ShardDataset(indexes["img"], socket=daemon.socket, **options)
    assert len(joined) == len(images) == TOTAL
    for _ in range(2):
        have = list(joined)
        assert [(s["__key__"], s["__url__"]) for s in have] == [
            (s["__key__"], s["__url__"]) for s in images
        ]
        assert members(have) == EXPECTED


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_of_a_plain_loader_share_a_joined_dataset(make: Make, context: str) -> None:
    """Each sample once, with all its members."""
    joined = make(batch_size=4, **SHUFFLE)
    loader = DataLoader(
        joined, batch_size=4, num_workers=2, collate_fn=list, multiprocessing_context=context
    )
    assert members(chain.from_iterable(loader)) == EXPECTED


@pytest.mark.slow
def test_large_members_of_all_sources_pass_without_a_copy(folder: Path, daemon: Daemon) -> None:
    """As Buffers over the file that each is in, which stays as long as any of them lives."""
    urls = [f"{folder}/large-{name}/" for name in ("a", "b")]
    written = [random_samples(20, {name: 9000}) for name in ("a", "b")]
    for url, samples in zip(urls, written, strict=True):
        Path(url).mkdir()
        Path(url, "0.tar").write_bytes(make_tar(samples))
    one, other = (ShardDataset(url, zero_copy=True, socket=daemon.socket) for url in urls)
    loader = DataLoader(Joined({"": one, "b": other}), batch_size=8, num_workers=2, collate_fn=list)
    for sample, first, second in zip(chain.from_iterable(list(loader)), *written, strict=True):
        assert type(sample["a"]) is type(sample["b.b"]) is Buffer
        assert sample["a"] == first["a"]
        assert sample["b.b"] == second["b"]


def test_an_epoch_is_resumed_on_other_ranks(
    make: Make, indexes: dict[str, str], daemon: Daemon
) -> None:
    """A state of Joined or of its first source suffices: the rest comes once, complete."""
    images = ShardDataset(indexes["img"], batch_size=4, socket=daemon.socket, **SHUFFLE)
    for begun in (make(batch_size=4, **SHUFFLE), images):
        loader = begun.loader(num_workers=2, collate_fn=keys_of)
        first = [key for batch in islice(loader, 5) for key in batch]
        state = json.dumps(loader.state_dict())
        rest = []
        for rank in range(3):
            resumed = make(batch_size=4, rank=rank, world_size=3, even=None, **SHUFFLE)
            resumed.load_state_dict(json.loads(state))
            rest += list(resumed)
        assert Counter(first + keys_of(rest)) == Counter(KEYS)
        assert all(len(sample["cap.txt"]) == 40 for sample in rest)


@pytest.mark.parametrize("world_size", first_quick([2, 1]))
def test_global_batches_are_those_of_the_first_source(
    make: Make, indexes: dict[str, str], daemon: Daemon, world_size: int
) -> None:
    """On one rank or two, with workers."""
    options: dict[str, Any] = {"global_batch_size": 8, "canonical_nodes": 2, **SHUFFLE}
    images = ShardDataset(indexes["img"], socket=daemon.socket, **options)
    ranks = [
        make(rank=rank, world_size=world_size, **options).loader(num_workers=2, collate_fn=list)
        for rank in range(world_size)
    ]
    batches = [list(chain.from_iterable(parts)) for parts in zip(*ranks, strict=True)]
    assert [keys_of(batch) for batch in batches] == list(
        images.loader(num_workers=0, collate_fn=keys_of)
    )
    assert all("cap.txt" in sample for batch in batches for sample in batch)


@pytest.mark.slow
def test_joined_datasets_are_mixed_divided_and_numbered(
    make: Make, indexes: dict[str, str], daemon: Daemon
) -> None:
    """Each chosen sample comes once with all members, even if two datasets share shards."""
    plain = ShardDataset(indexes["img"], socket=daemon.socket)
    mixture = Mixture({"joined": make(**SHUFFLE), "plain": plain, "again": make()})
    mixed = list(mixture)
    assert len(mixed) == len(mixture) == 3 * TOTAL
    for name in ("joined", "again"):
        assert members(sample for sample in mixed if sample["__source__"] == name) == EXPECTED
    assert {tuple(sample)[2:] for sample in mixed if sample["__source__"] == "plain"} == {
        ("jpg", "__source__")
    }
    assert members(chain(*make(**SHUFFLE).split(0.7, 0.3, seed=1))) == EXPECTED
    assert members(make().subset([3, 20, 11])) == [EXPECTED[number] for number in (3, 11, 20)]
    with make(**SHUFFLE).indexed(window=2) as numbered:
        assert members(numbered[number] for number in (40, 2, 13)) == [
            EXPECTED[number] for number in (2, 13, 40)
        ]


@pytest.mark.slow
def test_joined_datasets_with_global_batches_are_mixed_and_resumed(
    make: Make, indexes: dict[str, str], daemon: Daemon
) -> None:
    """A change of ranks in the epoch leaves the global batches of a mixture unchanged."""
    options: dict[str, Any] = {
        "global_batch_size": 8,
        "canonical_nodes": 2,
        "even": "drop",
        **SHUFFLE,
    }

    def loader(rank: int, ranks: int) -> Any:
        share = {"rank": rank, "world_size": ranks, **options}
        images = ShardDataset(indexes["img"], socket=daemon.socket, **share)
        others = {
            name: ShardDataset(indexes["cap"], socket=daemon.socket) for name in ("cap", "again")
        }
        mixture = Mixture({"three": Joined({"": images, **others}), "two": make(**share)})
        return mixture.loader(num_workers=0, collate_fn=list)

    def batches(loaders: list[Any]) -> list[Counter[tuple[str, ...]]]:
        rounds = zip(*loaders, strict=True)
        return [
            Counter((each["__key__"], *sorted(each)[3:]) for part in parts for each in part)
            for parts in rounds
        ]

    whole = batches([loader(0, 1)])
    assert {names[1:] for batch in whole for names in batch} == {
        ("again.txt", "cap.txt", "jpg"),
        ("cap.txt", "jpg"),
    }
    begun = [loader(rank, 2) for rank in range(2)]
    first = batches([islice(each, 5) for each in begun])
    resumed = [loader(rank, 4) for rank in range(4)]
    for each in resumed:
        each.load_state_dict(json.loads(json.dumps(begun[1].state_dict())))
    assert first + batches(resumed) == whole


@pytest.mark.slow
def test_selection_sees_the_members_of_all_sources(
    make: Make, daemon: Daemon, tmp_path: Path
) -> None:
    """Joined names are visible, whichever are read. Without a partner, a sample has none."""
    with pytest.raises(
        ConfigError, match=r"cap/index\.samples: select\(\) needs a table .* is missing"
    ):
        make().select(bool)
    images = recut(daemon, tmp_path / "img", IMAGES, COUNTS)
    few = [
        {**caption, "txt": b"long" * 100} if n % 2 else caption
        for n, caption in enumerate(CAPTIONS)
        if n % 5
    ]
    for cut in ((20, 12, 8), (7, 4, 13, 1, 9, 6)):
        captions = recut(daemon, tmp_path / f"cap{len(cut)}", few, cut)
        one, other = (
            ShardDataset(url, socket=daemon.socket, **SHUFFLE) for url in (images, captions)
        )
        joined = Joined({"img": one, "cap": other})
        assert sorted(keys_of(joined.select(lambda entry: "cap.txt" in entry.sizes))) == [
            sample["__key__"] for sample in few
        ]
        want = [key for n, key in enumerate(KEYS) if n % 5 and n % 2 and n < 25]
        with_long = Joined({"img": one, "cap": other}, members=["img.jpg"]).subset(range(25))
        chosen = with_long.select(
            lambda entry: entry.sizes.get("cap.txt") == 400 and entry.sizes["img.jpg"] == 40
        )
        assert sorted(keys_of(chosen)) == want
        assert len(chosen) == len(want)
    with pytest.raises(ConfigError, match=r"no sample is selected"):
        joined.select(lambda entry: {"jpg", "txt"} & entry.sizes.keys())


@pytest.mark.slow
def test_epoch_goes_on_with_another_daemon(tmp_path: Path, indexes: dict[str, str]) -> None:
    """A daemon is killed and starts with an empty cache, yet each complete sample comes once."""
    with Daemon(tmp_path) as daemon:
        one, other = (
            ShardDataset(url, socket=daemon.socket, **SHUFFLE) for url in indexes.values()
        )
        samples = iter(Joined({"": one, "cap": other}))
        have = list(islice(samples, 15))
        daemon.kill()
        shutil.rmtree(daemon.cache_dir)
        daemon.start()
        assert members(have + list(samples)) == EXPECTED


def test_plan_names_all_shards_and_the_window_holds_them(make: Make, daemon: Daemon) -> None:
    """Those of both sources, each beside the other, and no more than the window of each."""
    samples = iter(make(job="joined plan", epochs=1, **SHUFFLE))
    have = list(islice(samples, TOTAL // 2))
    (job,) = [job for job in daemon.status()["jobs"] if job["name"] == "joined plan"]
    assert job["sessions"] == 1
    assert job["shards_planned"] == 2 * len(COUNTS)
    eventually(lambda: 0 < daemon.leases() <= 2 * 3)
    assert len(have + list(samples)) == TOTAL
    eventually(lambda: daemon.leases() == 0)


@pytest.mark.parametrize(
    "chosen", first_quick([("jpg",), ("cap.txt",), ("png;jpg", "cap.txt;cap.json")])
)
def test_shards_of_which_no_member_is_chosen_are_not_fetched(
    tmp_path: Path, indexes: dict[str, str], chosen: tuple[str, ...]
) -> None:
    """Of the sources after the first, whose keys are read in any case."""
    with Daemon(tmp_path) as daemon:
        sources = {name: ShardDataset(url, socket=daemon.socket) for name, url in indexes.items()}
        have = members(Joined({"": sources["img"], "cap": sources["cap"]}, members=chosen))
        names = {each.split(";")[0]: each.split(";")[-1].replace("json", "txt") for each in chosen}
        assert have == [
            (key, {new: found[name] for new, name in names.items()}) for key, found in EXPECTED
        ]
        daemon.await_publication()
        fetched = {Path(shard["url"]).parent.name for shard in daemon.shards()}
        assert fetched == ({"img"} if chosen == ("jpg",) else {"img", "cap"})


def test_pattern_fits_members_of_joined_sources(make: Make) -> None:
    """Their names end in it; the sources are fetched for it."""
    sample = next(iter(make(own={"members": ("jpg", "*.txt")})))
    assert list(sample) == ["__key__", "__url__", "jpg", "txt"]


def test_members_are_decoded_by_their_joined_names(
    make: Make, indexes: dict[str, str], daemon: Daemon
) -> None:
    """By a table, or a function; stages follow, and readers without torch do the same."""
    table = {"jpg": len, "cap.txt": bytes}
    assert {sample["jpg"] for sample in make(own={"decode": table}).map(dict)} == {40}
    assert set(make(own={"decode": lambda sample: len(sample["cap.txt"])})) == {40}
    sources = {name: ShardReader(url, socket=daemon.socket) for name, url in indexes.items()}
    assert list(next(iter(JoinedReader(sources)))) == ["__key__", "__url__", "img.jpg", "cap.txt"]
    assert list(next(iter(JoinedReader({"img": sources["img"]})))) == [
        "__key__",
        "__url__",
        "img.jpg",
    ]
    with pytest.raises(
        DecodeError, match=r"cap/0\.tar: the member 'cap.txt' of the sample '000000'"
    ):
        list(make(own={"decode": {"cap.txt": int}}))


@pytest.mark.parametrize("varied", first_quick([("img",), ("cap",), ("img", "cap")]), ids=str)
def test_samples_of_a_shard_may_differ_in_members(
    indexes: dict[str, str], daemon: Daemon, tmp_path: Path, varied: tuple[str, ...]
) -> None:
    """Members of either source or of both: each sample has its own and its partner's."""

    def vary(_: int, samples: list[Sample]) -> None:
        samples[:] = [
            {**sample, "json": b"{}"} if int(str(sample["__key__"])) % 3 else sample
            for sample in samples
        ]

    urls = indexes | {
        name: write(tmp_path / name, {"img": "jpg", "cap": "txt"}[name], vary) for name in varied
    }
    one, other = (
        ShardDataset(urls[name], socket=daemon.socket, **SHUFFLE) for name in ("img", "cap")
    )
    more = {{"img": "json", "cap": "cap.json"}[name]: b"{}" for name in varied}
    assert members(Joined({"": one, "cap": other})) == [
        (k, v | (more if int(k) % 3 else {})) for k, v in EXPECTED
    ]


def test_members_of_one_name_are_refused(
    make: Make, indexes: dict[str, str], daemon: Daemon, tmp_path: Path
) -> None:
    """Of a sample and its partner, or of two partners; unless one of them is not read."""
    twice = write(
        tmp_path / "twice", "jpg", lambda _, some: some.append({**some.pop(), "cap.txt": b"own"})
    )
    images, named = (ShardDataset(url, socket=daemon.socket) for url in (twice, indexes["img"]))
    captions = ShardDataset(indexes["cap"], socket=daemon.socket)
    with pytest.raises(
        SampleError, match=r"twice/0\.tar: the sample '000008' has two members 'cap.txt'"
    ):
        list(Joined({"": images, "cap": captions}))
    assert len(list(Joined({"": images, "cap": captions}, members=["jpg"]))) == TOTAL
    dotted = write(tmp_path / "dotted", "b.txt")
    with pytest.raises(
        SampleError, match=r"img/0\.tar: the sample '000000' has two members 'a.b.txt'"
    ):
        list(Joined({"": named, "a": ShardDataset(dotted, socket=daemon.socket), "a.b": captions}))


# Samples without a partner


# Faults of shards that are read beside others


# Shards that are cut otherwise


@pytest.mark.parametrize(
    ("first", "second", "own", "said"),
    [
        ({}, {"members": ("txt",)}, {}, "'cap' has decode, members"),
        ({"missing": "skip"}, {}, {}, "'' has decode, members"),
        ({}, {"zero_copy": True}, {}, "'cap' and the first differ in zero_copy"),
        ({}, {"timeout_s": 1}, {}, "differ in socket, daemon"),
        ({}, {}, {"missing": {"cap.txt": b""}}, "missing has a value for 'cap.txt'"),
    ],
)
def test_sources_that_cannot_be_joined_are_refused(
    daemon: Daemon, indexes: dict[str, str], first: Any, second: Any, own: Any, said: str
) -> None:
    """An option that would otherwise be ignored is an error that names it."""
    images = ShardDataset(indexes["img"], socket=daemon.socket, **first)
    captions = ShardDataset(indexes["cap"], socket=daemon.socket, **second)
    with pytest.raises(ConfigError, match=said):
        Joined({"": images, "cap": captions}, **own)


def test_sources_are_named_datasets(make: Make, indexes: dict[str, str], daemon: Daemon) -> None:
    """Only the first prefix may be empty, and later sources may not be selections or mixtures."""
    images = ShardDataset(indexes["img"], socket=daemon.socket)
    for wrong in ({}, [images], {"": indexes["img"]}):
        with pytest.raises(ConfigError, match=r'give datasets by prefix, \{"": ShardDataset'):
            Joined(wrong)  # type: ignore[arg-type]
    for prefix in ("Cap", "a;b", ".a", "__key__"):
        with pytest.raises(ConfigError, match=rf"'{prefix}' cannot be a prefix of members"):
            Joined({"": images, prefix: images})
    captions = ShardDataset(indexes["cap"], socket=daemon.socket)
    with pytest.raises(ConfigError, match=r"'' is not the first source") as caught:
        Joined({"img": images, "": captions})
    assert "list it first" in caught.value.remedy
    with pytest.raises(ConfigError, match=r"'' is not the first source"):
        Joined({"img": images, "": images})
    for other in (images.subset([1]), Mixture({"a": images}), make()):
        with pytest.raises(
            ConfigError, match=r"'cap' is a selection|'cap' .* consists of sources itself"
        ):
            Joined({"": images, "cap": other})
