"""Datasets whose samples have members in tars of their own, joined by key, read from a real daemon."""

import json
import pickle
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from shardcache.errors import (
    ConfigError,
    CountMismatchError,
    DecodeError,
    MissingMemberError,
    NotATarError,
    SampleError,
    UnmatchedKeyError,
)
from shardcache_client import ignore_and_continue
from shardcache_client.dataset import Joined, Mixture, ShardDataset
from shardcache_client.joining import JoinedReader
from shardcache_client.reader import ShardReader
from shardcache_client.sharing.buffer import Buffer
from support.cases import first_quick
from support.programs.cli import shardcache
from support.programs.daemon import Daemon, eventually
from support.shards.reading import keys_of, write_index
from support.shards.tables import index_with_table, recut
from support.shards.tars import Sample, make_tar, random_samples

COUNTS = (9, 4, 17, 1, 12, 7)
TOTAL = sum(COUNTS)
KEYS = [f"{number:06d}" for number in range(TOTAL)]
SHUFFLE = {"shuffle": True, "shuffle_window": 3, "seed": 7}

Make = Callable[..., Joined]


def samples_of(shard: int, extension: str) -> list[Sample]:
    """Return the samples of a shard with one member."""
    return random_samples(
        COUNTS[shard], {extension: 40}, seed=ord(extension[0]), first=sum(COUNTS[:shard])
    )


def write(
    folder: Path, extension: str, change: Callable[[int, list[Sample]], object] = lambda *_: None
) -> str:
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
    captions = write(
        folder / "cap", "txt", lambda number, samples: random.Random(number).shuffle(samples)
    )
    return {"img": write(folder / "img", "jpg"), "cap": captions}


IMAGES, CAPTIONS = (
    list(chain(*(samples_of(n, name) for n in range(len(COUNTS))))) for name in ("jpg", "txt")
)
EXPECTED = [
    (str(image["__key__"]), {"jpg": image["jpg"], "cap.txt": caption["txt"]})
    for image, caption in zip(IMAGES, CAPTIONS, strict=True)
]


@pytest.fixture
def make(daemon: Daemon, indexes: dict[str, str]) -> Make:
    """A function that makes the dataset anew, as each process of a job would."""

    def make_joined(
        captions: str = indexes["cap"], own: Mapping[str, Any] | None = None, **options: Any
    ) -> Joined:
        images = ShardDataset(indexes["img"], socket=daemon.socket, **options)
        return Joined(
            {"": images, "cap": ShardDataset(captions, socket=daemon.socket)}, **(own or {})
        )

    return make_joined


def members(samples: Iterable[Mapping[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return key and members of each sample, sorted by key."""
    found = [
        (s["__key__"], {name: s[name] for name in s if not name.startswith("__")}) for s in samples
    ]
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
    """As any other dataset: each sample that is chosen once, with all its members; two of the same shards, too."""
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
    """The global batches of a mixture of three columns and two are the same after a change of ranks in the epoch."""
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
    """By joined names, whichever are read; without a partner, a sample has none of them. Selections combine."""
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
    """Killed amid an epoch, and started with an empty cache: each sample comes once, with the members of both."""
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
    """Those of the first source, of another or of both: each sample has its own, and its partner's."""

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


LOST = KEYS[16:20]
TWICE = KEYS[31]


@pytest.fixture(scope="module")
def spoilt(daemon: Daemon, indexes: dict[str, str], folder: Path) -> str:
    """The index of captions of which some are missing, and one comes twice; with tables of all keys."""

    def spoil(number: int, samples: list[Sample]) -> None:
        samples += [sample for sample in samples if sample["__key__"] == TWICE]
        samples[:] = [sample for sample in samples if sample["__key__"] not in LOST]

    write(folder / "spoilt", "txt", spoil)
    index_with_table(daemon, folder / "img")
    return index_with_table(daemon, folder / "spoilt")


def test_error_names_three_keys_without_a_partner_and_both_shards(make: Make, spoilt: str) -> None:
    """At the first of these samples; a key that comes twice has no partner, either. A handler may skip them."""
    keys = (
        "4 of 17 keys have no partner in .*/spoilt/2.tar, or several: '000016', '000017', '000018'"
    )
    with pytest.raises(
        UnmatchedKeyError,
        match=rf"/img/2.tar: the sample '000016' cannot be joined: {keys}\n.*='skip'",
    ):
        list(make(spoilt))
    with pytest.raises(
        UnmatchedKeyError, match=rf"1 of 12 keys have no partner in .*4.tar, .*: '{TWICE}'"
    ):
        list(make(spoilt).subset(range(20, TOTAL)))
    assert keys_of(make(spoilt, on_error=ignore_and_continue, even=None)) == [
        k for k in KEYS if k not in (*LOST, TWICE)
    ]


@pytest.mark.slow
def test_samples_without_a_partner_are_skipped_replaced_and_counted(
    make: Make, spoilt: str, daemon: Daemon
) -> None:
    """Ranks stay equal; status shows how many there were."""
    skip = {"missing": "skip"}
    assert keys_of(make(spoilt, skip, even=None, job="skipping")) == [
        k for k in KEYS if k not in (*LOST, TWICE)
    ]
    eventually(lambda: _unmatched(daemon, "skipping") == 5)
    assert "(5 samples unmatched)" in shardcache("status", socket=daemon.socket).out
    assert (
        'job_unmatched_samples_total{job_name="skipping",uid="'
        in daemon.request("GET", "/metrics").decode()
    )
    ranks = [keys_of(make(spoilt, skip, rank=rank, world_size=2, **SHUFFLE)) for rank in range(2)]
    assert [len(rank) for rank in ranks] == [25, 25]
    assert set(chain(*ranks)) == set(KEYS) - {*LOST, TWICE}
    mixture = Mixture(
        {"joined": make(spoilt, skip, even=None, **SHUFFLE), "whole": make(even=None)}
    )
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


@pytest.mark.slow
@pytest.mark.parametrize("fault", first_quick([NotATarError, CountMismatchError, SampleError]))
def test_unreadable_partners_leave_the_other_samples_in_place(
    make: Make, tmp_path: Path, fault: type[Exception]
) -> None:
    """No tar, another version, two members of one name: the error names the shard, a handler skips, from any state."""
    captions = write(tmp_path / "bad", "txt")
    (first, *others) = samples_of(2, "txt")
    tars = {NotATarError: b"no tar" * 1000, CountMismatchError: make_tar(others)}
    (tmp_path / "bad" / "2.tar").write_bytes(tars.get(fault) or make_tar([first, first, *others]))
    with pytest.raises(fault, match=r"bad/2\.tar"):
        list(make(captions))
    gone = KEYS[13:14] if fault is SampleError else KEYS[13:30]
    options: dict[str, Any] = {"on_error": ignore_and_continue, "even": None, **SHUFFLE}
    have = keys_of(make(captions, **options))
    assert have == [key for key in keys_of(make(**SHUFFLE)) if key not in gone]
    for taken in (2, 11, 30):
        begun = make(captions, **options)
        resumed = make(captions, **options)
        before = keys_of(islice(begun, taken))
        resumed.load_state_dict(begun.state_dict())
        assert before + keys_of(resumed) == have


@pytest.mark.slow
def test_partners_that_are_evicted_are_fetched_again(tmp_path: Path) -> None:
    """With a cache smaller than the dataset, two ranks get what they would get otherwise."""
    for name, shard in product(("a", "b"), range(8)):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / f"{shard}.tar").write_bytes(
            make_tar(random_samples(50, {name: 20_000}, first=50 * shard))
        )
    urls = [write_index(tmp_path / name, [50] * 8) for name in ("a", "b")]
    with Daemon(tmp_path, capacity="11MB") as daemon:
        options: dict[str, Any] = {
            "socket": daemon.socket,
            "shuffle": True,
            "shuffle_window": 2,
            "world_size": 2,
        }
        ranks = []
        for rank in range(2):
            one, other = (ShardDataset(url, rank=rank, **options) for url in urls)
            ranks.append(
                iter(
                    DataLoader(
                        Joined({"": one, "b": other}), batch_size=5, num_workers=1, collate_fn=list
                    )
                )
            )
        have = [sample for batches in zip(*ranks, strict=True) for sample in chain(*batches)]
        assert sorted(keys_of(have)) == [f"{number:06d}" for number in range(400)]
        assert all(len(sample["b.b"]) == len(sample["a"]) == 20_000 for sample in have)
        assert daemon.status()["counters"]["evictions"] > 0


# Shards that are cut otherwise


@pytest.mark.slow
def test_shards_of_other_sizes_are_joined_by_the_tables_of_their_keys(
    daemon: Daemon, tmp_path: Path
) -> None:
    """A shard is read with all that have partners of its samples; without tables, the error says how to write them."""
    images = recut(daemon, tmp_path / "img", IMAGES, COUNTS)
    captions, few = (
        recut(daemon, tmp_path / f"cap{len(cut)}", CAPTIONS, cut)
        for cut in ((20, 5, 22, 3), (20, 5))
    )
    for options in ({"even": None}, SHUFFLE):
        one, other, part = (
            ShardDataset(url, socket=daemon.socket, **options) for url in (images, captions, few)
        )
        joined = Joined({"": one, "cap": other})
        assert members(joined) == EXPECTED
        with joined.indexed() as numbered:
            assert members([numbered[22]]) == [EXPECTED[22]]
        with pytest.raises(
            UnmatchedKeyError, match=r"1 of 1 keys .* in any shard of 'cap\.', .*: '000030'"
        ) as lost:
            list(Joined({"": one, "cap": part}).subset([30]))
        assert "rewrite the shards" in lost.value.remedy
        assert "shardcache index" not in lost.value.remedy, "the tables are there"
        if "even" in options:
            assert keys_of(Joined({"": one, "cap": part}, missing="skip")) == KEYS[:25]
    bare = ShardDataset(write(tmp_path / "bare", "jpg"), socket=daemon.socket)
    with pytest.raises(
        ConfigError, match=r"6 shards are joined with 2 by the tables of their keys"
    ) as caught:
        Joined({"": bare, "cap": part})
    assert "--samples" in str(caught.value.remedy)


@pytest.mark.slow
def test_as_many_shards_that_are_cut_otherwise_are_joined_by_the_tables(
    daemon: Daemon, tmp_path: Path
) -> None:
    """Shards without tables are paired by number, and a wrong table is an error."""
    images = recut(daemon, tmp_path / "img", IMAGES, COUNTS)
    captions = recut(daemon, tmp_path / "cap", CAPTIONS, (20, 5, 5, 10, 5, 5))
    one, other = (ShardDataset(url, socket=daemon.socket) for url in (images, captions))
    assert members(Joined({"": one, "cap": other})) == EXPECTED
    odd = ShardDataset(
        recut(daemon, tmp_path / "odd", CAPTIONS, (5, 20, 5, 10, 5, 5)), socket=daemon.socket
    )
    table = tmp_path / "odd" / "index.samples"
    shutil.copy(tmp_path / "cap" / table.name, table)
    with pytest.raises(ConfigError, match=r"the table of samples does not match the index file"):
        Joined({"": one, "cap": odd})
    bare = ShardDataset(
        write(tmp_path / "bare", "txt", lambda _, some: some.pop()), socket=daemon.socket
    )
    assert len(keys_of(Joined({"": one, "cap": bare}).subset(range(8)))) == 8


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
