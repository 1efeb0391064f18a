"""Samples of joined datasets without a partner, and sources whose shards are cut otherwise."""

import shutil
from itertools import chain, islice, product
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
from shardcache_client import ignore_and_continue
from shardcache_client.dataset import Joined, Mixture, ShardDataset
from support.cases import first_quick
from support.programs.cli import shardcache
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
    samples_of,
    write,
)
from support.shards.reading import keys_of, write_index
from support.shards.tables import index_with_table, recut
from support.shards.tars import Sample, make_tar, random_samples

LOST = KEYS[16:20]


TWICE = KEYS[31]


@pytest.fixture(scope="module")
def spoilt(daemon: Daemon, indexes: dict[str, str], folder: Path) -> str:
    """The index of captions with missing and repeated keys, with tables of all keys."""

    def spoil(number: int, samples: list[Sample]) -> None:
        samples += [sample for sample in samples if sample["__key__"] == TWICE]
        samples[:] = [sample for sample in samples if sample["__key__"] not in LOST]

    write(folder / "spoilt", "txt", spoil)
    index_with_table(daemon, folder / "img")
    return index_with_table(daemon, folder / "spoilt")


def test_error_names_three_keys_without_a_partner_and_both_shards(make: Make, spoilt: str) -> None:
    """The first sample without a unique partner raises it. A handler may skip such samples."""
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
    metric = 'job_unmatched_samples_total{job_name="skipping",uid="'
    assert metric in daemon.request("GET", "/metrics").decode()
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


@pytest.mark.slow
@pytest.mark.parametrize("fault", first_quick([NotATarError, CountMismatchError, SampleError]))
def test_unreadable_partners_leave_the_other_samples_in_place(
    make: Make, tmp_path: Path, fault: type[Exception]
) -> None:
    """The error names the partner's shard, and a handler skips its samples, from any state."""
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


@pytest.mark.slow
def test_shards_of_other_sizes_are_joined_by_the_tables_of_their_keys(
    daemon: Daemon, tmp_path: Path
) -> None:
    """A shard is read with its partners' shards. Without tables, the error says what to do."""
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
