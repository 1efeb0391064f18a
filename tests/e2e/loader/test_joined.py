"""Datasets whose samples have members in tars of their own, joined by key, read from a real daemon."""

import json
import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain, islice, product
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from shardcache.errors import (
    ConfigError,
    CountMismatchError,
    MissingMemberError,
    NotATarError,
    SampleError,
    UnmatchedKeyError,
)
from shardcache_client import Joined, JoinedReader, Mixture, ShardDataset, ShardReader, ignore_and_continue
from shardcache_client.sharing.handover import Buffer
from support.programs.cli import shardcache
from support.programs.daemon import Daemon, eventually
from support.shards.reading import keys_of, write_index
from support.shards.tars import Sample, make_tar, random_samples

COUNTS = (9, 4, 17, 1, 12, 7)
TOTAL = sum(COUNTS)
KEYS = [f"{number:06d}" for number in range(TOTAL)]
SHUFFLE = {"shuffle": True, "shuffle_window": 3, "seed": 7}

Make = Callable[..., Joined]


def samples_of(shard: int, extension: str) -> list[Sample]:
    """Return the samples of a shard with one member."""
    return random_samples(COUNTS[shard], {extension: 40}, seed=ord(extension[0]), first=sum(COUNTS[:shard]))


def write(folder: Path, extension: str, change: Callable[[int, list[Sample]], object] = lambda *_: None) -> str:
    """Write the shards with one member of each sample, perhaps changed; return the url of their index."""
    folder.mkdir()
    shards = [samples_of(number, extension) for number in range(len(COUNTS))]
    for number, samples in enumerate(shards):
        change(number, samples)
        (folder / f"{number}.tar").write_bytes(make_tar(samples))
    return write_index(folder, list(map(len, shards)))


@pytest.fixture(scope="module")
def indexes(folder: Path) -> dict[str, str]:
    """The index files of images, and of captions in another order inside their shards."""
    captions = write(folder / "cap", "txt", lambda number, samples: random.Random(number).shuffle(samples))
    return {"img": write(folder / "img", "jpg"), "cap": captions}


IMAGES, CAPTIONS = (list(chain(*(samples_of(n, name) for n in range(len(COUNTS))))) for name in ("jpg", "txt"))
EXPECTED = [
    (str(image["__key__"]), {"jpg": image["jpg"], "cap.txt": caption["txt"]})
    for image, caption in zip(IMAGES, CAPTIONS, strict=True)
]


@pytest.fixture
def make(daemon: Daemon, indexes: dict[str, str]) -> Make:
    """A function that makes the dataset anew, as each process of a job would."""

    def make_joined(captions: str = indexes["cap"], own: Mapping[str, Any] | None = None, **options: Any) -> Joined:
        images = ShardDataset(indexes["img"], socket=daemon.socket, **options)
        return Joined({"": images, "cap": ShardDataset(captions, socket=daemon.socket)}, **(own or {}))

    return make_joined


def members(samples: Iterable[Mapping[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return key and members of each sample, sorted by key."""
    found = [(s["__key__"], {name: s[name] for name in s if not name.startswith("__")}) for s in samples]
    return sorted(found, key=lambda each: each[0])


@pytest.mark.parametrize("options", [{}, SHUFFLE, {"shuffle": True, "shuffle_window": 0}], ids=str)
def test_joined_samples_are_those_of_the_first_source(
    make: Make, indexes: dict[str, str], daemon: Daemon, options: dict[str, Any]
) -> None:
    """In its order, with its url and exact length, in several epochs; members come from the shards beside, by key."""
    joined = pickle.loads(pickle.dumps(make(**options)))
    images = ShardDataset(indexes["img"], socket=daemon.socket, **options)
    assert len(joined) == len(images) == TOTAL
    for _ in range(2):
        have = list(joined)
        assert [(s["__key__"], s["__url__"]) for s in have] == [(s["__key__"], s["__url__"]) for s in images]
        assert members(have) == EXPECTED


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_of_a_plain_loader_share_a_joined_dataset(make: Make, context: str) -> None:
    """Each sample once, with all its members."""
    joined = make(batch_size=4, **SHUFFLE)
    loader = DataLoader(joined, batch_size=4, num_workers=2, collate_fn=list, multiprocessing_context=context)
    assert members(chain.from_iterable(loader)) == EXPECTED


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
        assert (sample["a"], sample["b.b"]) == (first["a"], second["b"])


def test_an_epoch_is_resumed_on_other_ranks(make: Make, indexes: dict[str, str], daemon: Daemon) -> None:
    """From a state of Joined or of its first source alone: the rest comes once, with all members."""
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


@pytest.mark.parametrize("world_size", [1, 2])
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
    assert [keys_of(batch) for batch in batches] == list(images.loader(num_workers=0, collate_fn=keys_of))
    assert all("cap.txt" in sample for batch in batches for sample in batch)


def test_joined_datasets_are_mixed_divided_and_numbered(make: Make, indexes: dict[str, str], daemon: Daemon) -> None:
    """As any other dataset: each sample that is chosen once, with all its members; two of the same shards, too."""
    plain = ShardDataset(indexes["img"], socket=daemon.socket)
    mixture = Mixture({"joined": make(**SHUFFLE), "plain": plain, "again": make()})
    mixed = list(mixture)
    assert len(mixed) == len(mixture) == 3 * TOTAL
    for name in ("joined", "again"):
        assert members(sample for sample in mixed if sample["__source__"] == name) == EXPECTED
    assert {tuple(sample)[2:] for sample in mixed if sample["__source__"] == "plain"} == {("jpg", "__source__")}
    assert members(chain(*make(**SHUFFLE).split(0.7, 0.3, seed=1))) == EXPECTED
    assert members(make().subset([3, 20, 11])) == [EXPECTED[number] for number in (3, 11, 20)]
    with make(**SHUFFLE).indexed(window=2) as numbered:
        assert members(numbered[number] for number in (40, 2, 13)) == [EXPECTED[number] for number in (2, 13, 40)]


def test_plan_names_all_shards_and_the_window_holds_them(make: Make, daemon: Daemon) -> None:
    """Those of both sources, each beside the other, and no more than the window of each."""
    samples = iter(make(job="joined plan", epochs=1, **SHUFFLE))
    have = list(islice(samples, TOTAL // 2))
    (job,) = [job for job in daemon.status()["jobs"] if job["name"] == "joined plan"]
    assert (job["sessions"], job["shards_planned"]) == (1, 2 * len(COUNTS))
    eventually(lambda: 0 < daemon.leases() <= 2 * 3)
    assert len(have + list(samples)) == TOTAL
    eventually(lambda: daemon.leases() == 0)


@pytest.mark.parametrize("chosen", [("jpg",), ("cap.txt",), ("png;jpg", "cap.txt;cap.json")])
def test_shards_of_which_no_member_is_chosen_are_not_fetched(
    tmp_path: Path, indexes: dict[str, str], chosen: tuple[str, ...]
) -> None:
    """Of the sources after the first, whose keys are read in any case."""
    with Daemon(tmp_path) as daemon:
        sources = {name: ShardDataset(url, socket=daemon.socket) for name, url in indexes.items()}
        have = members(Joined({"": sources["img"], "cap": sources["cap"]}, members=chosen))
        names = {each.split(";")[0]: each.split(";")[-1].replace("json", "txt") for each in chosen}
        assert have == [(key, {new: found[name] for new, name in names.items()}) for key, found in EXPECTED]
        fetched = {Path(shard["url"]).parent.name for shard in daemon.shards()}
        assert fetched == ({"img"} if chosen == ("jpg",) else {"img", "cap"})


def test_members_are_decoded_by_their_joined_names(make: Make, indexes: dict[str, str], daemon: Daemon) -> None:
    """By a table, or a function; stages follow, and readers without torch do the same."""
    table = {"jpg": len, "cap.txt": bytes}
    assert {sample["jpg"] for sample in make(own={"decode": table}).map(dict)} == {40}
    assert set(make(own={"decode": lambda sample: len(sample["cap.txt"])})) == {40}
    sources = {name: ShardReader(url, socket=daemon.socket) for name, url in indexes.items()}
    assert list(next(iter(JoinedReader(sources)))) == ["__key__", "__url__", "img.jpg", "cap.txt"]
    assert list(next(iter(JoinedReader({"img": sources["img"]})))) == ["__key__", "__url__", "img.jpg"]


# Samples without a partner


LOST, TWICE = KEYS[16:20], KEYS[31]


@pytest.fixture(scope="module")
def spoilt(folder: Path) -> str:
    """The index of captions of which some are missing, and one comes twice."""

    def spoil(number: int, samples: list[Sample]) -> None:
        samples += [sample for sample in samples if sample["__key__"] == TWICE]
        samples[:] = [sample for sample in samples if sample["__key__"] not in LOST]

    return write(folder / "spoilt", "txt", spoil)


def test_error_names_three_keys_without_a_partner_and_both_shards(make: Make, spoilt: str) -> None:
    """At the first of these samples; a key that comes twice has no partner, either. A handler may skip them."""
    keys = "4 of 17 keys have no partner in .*/spoilt/2.tar, or several: '000016', '000017', '000018'"
    with pytest.raises(
        UnmatchedKeyError, match=rf"/img/2.tar: the sample '000016' cannot be joined: {keys}\n.*='skip'"
    ):
        list(make(spoilt))
    with pytest.raises(UnmatchedKeyError, match=rf"1 of 12 keys have no partner in .*4.tar, .*: '{TWICE}'"):
        list(make(spoilt).subset(range(20, TOTAL)))
    assert keys_of(make(spoilt, on_error=ignore_and_continue, even=None)) == [
        k for k in KEYS if k not in (*LOST, TWICE)
    ]


def test_samples_without_a_partner_are_skipped_replaced_and_counted(make: Make, spoilt: str, daemon: Daemon) -> None:
    """Ranks stay equal; status shows how many there were."""
    skip = {"missing": "skip"}
    assert keys_of(make(spoilt, skip, even=None, job="skipping")) == [k for k in KEYS if k not in (*LOST, TWICE)]
    eventually(lambda: _unmatched(daemon, "skipping") == 5)
    ranks = [keys_of(make(spoilt, skip, rank=rank, world_size=2, **SHUFFLE)) for rank in range(2)]
    assert [len(rank) for rank in ranks] == [25, 25]
    assert set(chain(*ranks)) == set(KEYS) - {*LOST, TWICE}
    mixture = Mixture({"joined": make(spoilt, skip, even=None, **SHUFFLE), "whole": make(even=None)})
    assert len(list(mixture)) == 2 * TOTAL - 5
    with pytest.raises(ConfigError, match="missing='skip'"):
        make(spoilt, skip).indexed()


def _unmatched(daemon: Daemon, name: str) -> int:
    return sum(job["samples_unmatched"] for job in daemon.status()["jobs"] if job["name"] == name)


def test_members_of_samples_without_a_partner_have_defaults(make: Make, spoilt: str) -> None:
    """Copies of the values given; a default of another source is none of this one."""
    joined = make(spoilt, {"members": ("jpg", "cap.txt"), "missing": {"cap.txt": []}})
    have = {sample["__key__"]: sample["cap.txt"] for sample in joined}
    assert [key for key in KEYS if have[key] == []] == [*LOST, TWICE]
    assert have[LOST[0]] is not have[LOST[1]]
    with pytest.raises(UnmatchedKeyError):
        list(make(spoilt, {"members": ("jpg", "cap.txt"), "missing": {"jpg": b""}}))
    with pytest.raises(MissingMemberError, match=r"no member 'cap.json'"):
        list(make(spoilt, {"members": ("cap.txt", "cap.json"), "missing": {"cap.txt": b""}}))


# Faults of shards that are read beside others


@pytest.mark.parametrize("fault", [NotATarError, CountMismatchError, SampleError])
def test_unreadable_partners_leave_the_other_samples_in_place(
    make: Make, tmp_path: Path, fault: type[Exception]
) -> None:
    """No tar, another version, two members of one name: the error names the shard, a handler skips, from any state."""
    captions, (first, *others) = write(tmp_path / "bad", "txt"), samples_of(2, "txt")
    tars = {NotATarError: b"no tar" * 1000, CountMismatchError: make_tar(others)}
    (tmp_path / "bad" / "2.tar").write_bytes(tars.get(fault) or make_tar([first, first, *others]))
    with pytest.raises(fault, match=r"bad/2\.tar"):
        list(make(captions))
    gone = KEYS[13:14] if fault is SampleError else KEYS[13:30]
    options: dict[str, Any] = {"on_error": ignore_and_continue, "even": None, **SHUFFLE}
    have = keys_of(make(captions, **options))
    assert have == [key for key in keys_of(make(**SHUFFLE)) if key not in gone]
    for taken in (2, 11, 30):
        begun, resumed = make(captions, **options), make(captions, **options)
        before = keys_of(islice(begun, taken))
        resumed.load_state_dict(begun.state_dict())
        assert before + keys_of(resumed) == have


def test_partners_that_are_evicted_are_fetched_again(tmp_path: Path) -> None:
    """With a cache smaller than the dataset, two ranks get what they would get otherwise."""
    for name, shard in product(("a", "b"), range(8)):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / f"{shard}.tar").write_bytes(make_tar(random_samples(50, {name: 20_000}, first=50 * shard)))
    urls = [write_index(tmp_path / name, [50] * 8) for name in ("a", "b")]
    with Daemon(tmp_path, capacity="11MB") as daemon:
        options: dict[str, Any] = {"socket": daemon.socket, "shuffle": True, "shuffle_window": 2, "world_size": 2}
        ranks = []
        for rank in range(2):
            one, other = (ShardDataset(url, rank=rank, **options) for url in urls)
            ranks.append(iter(DataLoader(Joined({"": one, "b": other}), batch_size=5, num_workers=1, collate_fn=list)))
        have = [sample for batches in zip(*ranks, strict=True) for sample in chain(*batches)]
        assert sorted(keys_of(have)) == [f"{number:06d}" for number in range(400)]
        assert all(len(sample["b.b"]) == len(sample["a"]) == 20_000 for sample in have)
        assert daemon.status()["counters"]["evictions"] > 0


# Shards that are cut otherwise


def recut(daemon: Daemon, folder: Path, samples: Sequence[Sample], counts: Sequence[int]) -> str:
    """Write shards of these numbers of samples, with an index and a table of their keys; return the index's url."""
    folder.mkdir()
    for number, start in enumerate(accumulate(counts[:-1], initial=0)):
        (folder / f"{number}.tar").write_bytes(make_tar(samples[start : start + counts[number]]))
    ran = shardcache("index", f"{folder}/", "-o", folder / "index.json", "--samples", socket=daemon.socket)
    assert ran.code == 0, ran.err
    return f"file://{folder}/index.json"


def test_shards_of_other_sizes_are_joined_by_the_tables_of_their_keys(
    make: Make, daemon: Daemon, tmp_path: Path
) -> None:
    """A shard is read with all that have partners of its samples; without tables, the error says how to write them."""
    images = recut(daemon, tmp_path / "img", IMAGES, COUNTS)
    captions, few = (recut(daemon, tmp_path / f"cap{len(cut)}", CAPTIONS, cut) for cut in ((20, 5, 22, 3), (20, 5)))
    for options in ({"even": None}, SHUFFLE):
        one, other, part = (ShardDataset(url, socket=daemon.socket, **options) for url in (images, captions, few))
        joined = Joined({"": one, "cap": other})
        assert members(joined) == EXPECTED
        with joined.indexed() as numbered:
            assert members([numbered[22]]) == [EXPECTED[22]]
        with pytest.raises(UnmatchedKeyError, match=r"1 of 1 keys .* in any shard of 'cap\.', .*: '000030'"):
            list(Joined({"": one, "cap": part}).subset([30]))
        if "even" in options:
            assert keys_of(Joined({"": one, "cap": part}, missing="skip")) == KEYS[:25]
    with pytest.raises(ConfigError, match=r"6 shards are joined with 2 by the tables of their keys") as caught:
        make(few)
    assert "--samples" in str(caught.value.remedy)


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
    """By prefixes of which only the first is empty; no mixtures, and of no selection after the first."""
    images = ShardDataset(indexes["img"], socket=daemon.socket)
    for wrong in ({}, [images], {"img": images, "": images}, {"": indexes["img"]}):
        with pytest.raises(ConfigError, match=r'give datasets by prefix, \{"": ShardDataset'):
            Joined(wrong)  # type: ignore[arg-type]
    for other in (images.subset([1]), Mixture({"a": images}), make()):
        with pytest.raises(ConfigError, match=r"'cap' is a selection|'cap' .* consists of sources itself"):
            Joined({"": images, "cap": other})
