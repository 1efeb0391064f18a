"""Bad samples and shards, stale indexes and failing decoders: typed, counted, made up for."""

import gc
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from shardcache.errors import (
    CountMismatchError,
    DecodeError,
    NotATarError,
    NotFoundError,
    OutdatedError,
    SampleError,
    ShardcacheError,
    ShardError,
    TrailingDataError,
)
from shardcache_client import ignore_and_continue, ignore_and_stop
from shardcache_client.dataset import Mixture, ShardDataset
from shardcache_client.loading.loader import ShardLoader
from support.cases import first_quick
from support.programs.daemon import Daemon, eventually
from support.shards.reading import keys_of
from support.shards.tars import make_tar, random_samples, write_indexed

SHARDS = 4
SAMPLES = 6
KEYS = [f"{number:06d}" for number in range(SHARDS * SAMPLES)]
BAD = 1  # the number of the shard that something is wrong with
LOST = KEYS[BAD * SAMPLES : (BAD + 1) * SAMPLES]

Decode = Callable[[dict[str, Any]], Any]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder of good shards and their index, new for each test so that nothing is cached."""
    write_indexed(tmp_path, [SAMPLES] * SHARDS)
    return tmp_path


def write(source: Path, number: int, samples: list[Any]) -> None:
    """Write one shard."""
    (source / f"{number}.tar").write_bytes(make_tar(samples))


def spoil(source: Path, fault: str) -> None:
    """Have something be wrong with one shard."""
    shard = source / f"{BAD}.tar"
    samples = random_samples(SAMPLES, {"bin": 200}, first=BAD * SAMPLES)
    match fault:
        case "bad sample":
            write(source, BAD, [*samples[:2], samples[2], *samples[2:]])
        case "no tar":
            shard.write_bytes(b"<html>404</html>" * 1000)
        case "joined tars":
            shard.write_bytes(make_tar(samples[:3]) + make_tar(samples[3:]))
        case "vanished":
            shard.unlink()
        case "more samples":
            write(source, BAD, [*samples, *random_samples(1, first=900)])
        case "fewer samples":
            write(source, BAD, samples[:-1])
        case "another version":
            index = json.loads((source / "index.json").read_text())
            index["shardlist"][BAD]["etag"] = '"old"'
            (source / "index.json").write_text(json.dumps(index))


def decode(sample: dict[str, Any]) -> dict[str, Any]:
    """Fail for one sample of the bad shard."""
    if sample["__key__"] == LOST[2]:
        raise ValueError("no image")
    return sample


@dataclass(frozen=True)
class Fault:
    """Something that is wrong with one shard, the error for it, and the samples that it costs."""

    name: str
    error: type[ShardcacheError]
    lost: list[str]
    decode: Decode | None = None


FAULTS = [
    Fault("bad sample", SampleError, LOST[2:3]),
    Fault("undecodable", DecodeError, LOST[2:3], decode),
    Fault("no tar", NotATarError, LOST),
    Fault("joined tars", TrailingDataError, LOST),
    Fault("vanished", NotFoundError, LOST),
    Fault("more samples", CountMismatchError, LOST),
    Fault("fewer samples", CountMismatchError, LOST),
    Fault("another version", OutdatedError, LOST),
]
ORDERS: list[dict[str, Any]] = [{"shuffle": False}, {"shuffle": True, "shuffle_window": 3}]

faults = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
in_order = pytest.mark.parametrize(
    "order", [ORDERS[0], pytest.param(ORDERS[1], marks=pytest.mark.slow)], ids=["in order", "mixed"]
)
mixed = pytest.mark.parametrize(
    "order", [pytest.param(ORDERS[0], marks=pytest.mark.slow), ORDERS[1]], ids=["in order", "mixed"]
)


@faults
@in_order
def test_bad_data_are_typed_errors_that_a_handler_may_skip(
    daemon: Daemon, source: Path, fault: Fault, order: dict[str, Any]
) -> None:
    """An error that names the shard ends the epoch by default. Good samples come once.

    The session ends with the dataset's last reference, not when the garbage collector comes: until
    then the daemon would fetch for an epoch that never begins.
    """
    spoil(source, fault.name)
    job = f"{fault.name} {order}"
    options: dict[str, Any] = {
        "decode": fault.decode,
        "even": None,
        "socket": daemon.socket,
        "job": job,
        **order,
    }
    with pytest.raises(fault.error, match=f"{BAD}\\.tar") as caught:
        list(ShardDataset(f"file://{source}/index.json", **options))
    assert type(caught.value) is fault.error
    assert caught.value.remedy
    caught.value.__traceback__ = None

    def sessions() -> int:
        return sum(each["sessions"] for each in daemon.status()["jobs"] if each["name"] == job)

    gc.collect()
    eventually(lambda: sessions() == 0)
    gc.disable()
    try:
        dataset = ShardDataset(
            f"file://{source}/index.json", on_error=ignore_and_continue, **options
        )
        assert sorted(keys_of(dataset)) == [key for key in KEYS if key not in fault.lost]
        assert sessions() == 1
        del dataset
        eventually(lambda: sessions() == 0)
    finally:
        gc.enable()


@pytest.mark.parametrize("lost", first_quick(["samples", "shards"]))
def test_warnings_end_after_five_errors_of_an_epoch_and_all_are_counted(
    daemon: Daemon, tmp_path: Path, lost: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In each epoch anew; and none advises the handler that is in use."""
    url = write_indexed(tmp_path, [1] * 20)
    if lost == "shards":
        for number in range(1, 20):
            (tmp_path / f"{number}.tar").unlink()
    options: dict[str, Any] = {
        "on_error": "warn",
        "even": None,
        "epochs": 2,
        "socket": daemon.socket,
    }
    if lost == "samples":
        options["decode"] = {"jpg": int}
    dataset = ShardDataset(url, **options)
    for epoch in range(2):
        caplog.clear()
        with pytest.warns(UserWarning) as caught:
            list(dataset)
        texts = [str(warning.message) for warning in caught]
        assert len(texts) == 5
        assert [text for text in texts if "on_error" in text] == []
        assert ["No further warnings in this epoch" in text for text in texts] == [False] * 4 + [
            True
        ]
        counted = "0 shards, and 20 samples" if lost == "samples" else "19 shards, and 0 samples"
        assert f"epoch {epoch}: skipped {counted}" in caplog.text


def test_error_of_a_sample_names_the_handler_that_skips_it(daemon: Daemon, source: Path) -> None:
    """Only iteration calls a handler: samples by number go to none."""
    dataset = ShardDataset(f"file://{source}/index.json", decode={"jpg": int}, socket=daemon.socket)
    for samples, advice in (
        (dataset, 'on_error="warn" skips such samples'),
        (dataset.indexed(), ""),
    ):
        with pytest.raises(DecodeError) as caught:
            next(iter(samples))
        assert caught.value.remedy == "; ".join(
            filter(None, ["fix the member or its decoder", advice])
        )


def test_session_ends_with_the_dataset_after_a_whole_epoch(daemon: Daemon, source: Path) -> None:
    """The last reference ends it, not the garbage collector, as the daemon keeps plans."""
    gc.disable()
    try:
        dataset = ShardDataset(
            f"file://{source}/index.json", socket=daemon.socket, job="whole epoch"
        )
        assert keys_of(dataset) == KEYS
        del dataset
        eventually(
            lambda: (
                [job["sessions"] for job in daemon.status()["jobs"] if job["name"] == "whole epoch"]
                == [0]
            ),
        )
    finally:
        gc.enable()


@faults
@mixed
def test_skipped_samples_are_replaced_by_others(
    daemon: Daemon,
    source: Path,
    fault: Fault,
    order: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Ranks stay equal: good samples are given again for bad ones, and the log counts it."""
    spoil(source, fault.name)
    errors: list[Exception] = []
    read = []
    options = {
        "decode": fault.decode,
        "on_error": lambda exn: not errors.append(exn),
        "socket": daemon.socket,
        **order,
    }
    for rank in range(2):
        ds = ShardDataset(f"file://{source}/index.json", rank=rank, world_size=2, **options)
        read.append(keys_of(ds))
        assert len(read[-1]) == len(ds) == len(KEYS) // 2
    given = Counter(read[0] + read[1])
    assert set(given) == set(KEYS) - set(fault.lost)
    assert {type(exn) for exn in errors} == {fault.error}
    reports = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    numbers = [
        tuple(int(word) for word in report.split() if word.isdecimal()) for report in reports
    ]
    shards, samples = [sum(column) for column in zip(*numbers, strict=True)]
    if issubclass(fault.error, SampleError):
        assert shards == 0
        assert samples == len(fault.lost)
    else:
        assert 1 <= shards <= 2, "one for each rank that has a part of it"
        assert samples == 0
    assert all(
        "epoch 0: skipped" in report and "were repeated in their place" in report
        for report in reports
    )


@pytest.mark.parametrize("fault", first_quick(["bad sample", "no tar"]))
@mixed
def test_run_over_bad_data_resumes_from_any_sample(
    daemon: Daemon, source: Path, fault: str, order: dict[str, Any]
) -> None:
    """The rest is what would have come, before and behind bad samples and their substitutes."""
    spoil(source, fault)

    def make() -> ShardDataset:
        url = f"file://{source}/index.json"
        return ShardDataset(
            url, on_error=ignore_and_continue, socket=daemon.socket, rank=0, world_size=2, **order
        )

    ds = make()
    samples = iter(ds)
    states = [ds.state_dict()]
    read = []
    for sample in samples:
        read.append(sample["__key__"])
        states.append(ds.state_dict())
    assert len(read) == len(KEYS) // 2
    resumed = make()
    for taken, state in enumerate(states[:-1]):
        resumed.load_state_dict(state)
        assert keys_of(resumed) == read[taken:]
    resumed.load_state_dict(states[-1])
    assert resumed.epoch == 1


@pytest.mark.parametrize(
    "world_size",
    [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)],
)
def test_state_with_only_bad_samples_left_resumes_on_any_ranks(
    daemon: Daemon, source: Path, world_size: int
) -> None:
    """Each rank gets equally many good samples for those left, and then the next epoch."""
    (source / f"{SHARDS - 1}.tar").write_bytes(b"<html>404</html>" * 1000)

    def make(rank: int, world_size: int) -> ShardDataset:
        url = f"file://{source}/index.json"
        topology = {"rank": rank, "world_size": world_size}
        return ShardDataset(url, on_error=ignore_and_continue, socket=daemon.socket, **topology)

    before = make(0, 1)
    samples = iter(before)
    good = keys_of(islice(samples, (SHARDS - 1) * SAMPLES))
    state = before.state_dict()

    for rank in range(world_size):
        resumed = make(rank, world_size)
        resumed.load_state_dict(state)
        rest = keys_of(resumed)
        assert len(rest) == SAMPLES // world_size
        assert set(rest) <= set(good)
        assert resumed.epoch == 1


@pytest.mark.slow
def test_a_share_in_which_nothing_can_be_read(daemon: Daemon, source: Path) -> None:
    """However patient the handler, that is an error and not an endless epoch."""
    for number in range(SHARDS):
        (source / f"{number}.tar").write_bytes(b"<html>404</html>" * 1000)
    ds = ShardDataset(
        f"file://{source}/index.json", on_error=ignore_and_continue, socket=daemon.socket
    )
    with pytest.raises(ShardError, match="rank 0 cannot read any sample in epoch 0"):
        list(ds)


@pytest.mark.slow
@mixed
@pytest.mark.parametrize("samples_per_epoch", [pytest.param(10**5, marks=pytest.mark.slow), 10**9])
def test_one_pass_without_a_good_sample_is_an_error_however_long_the_epoch(
    daemon: Daemon, source: Path, order: dict[str, Any], samples_per_epoch: int
) -> None:
    """It says how many were tried, and the first cause; hardly any sample is tried a third time."""
    options: dict[str, Any] = {
        "samples_per_epoch": samples_per_epoch,
        "socket": daemon.socket,
        **order,
    }
    ds = ShardDataset(
        f"file://{source}/index.json", decode={"jpg": int}, on_error=ignore_and_continue, **options
    )
    with pytest.raises(ShardError, match="cannot read any sample in epoch 0") as caught:
        next(iter(ds))
    tried = int(str(caught.value).partition(" tried")[0].rpartition("(")[2])
    assert len(KEYS) <= tried < 3 * len(KEYS)
    assert "the first error that on_error skipped was: file://" in str(caught.value)


@pytest.mark.slow
def test_filter_that_leaves_out_all_samples_is_an_error_after_one_pass(
    daemon: Daemon, source: Path
) -> None:
    """In an epoch of many passes, the later ones would give nothing either."""
    ds = ShardDataset(f"file://{source}/index.json", samples_per_epoch=10**9, socket=daemon.socket)
    with pytest.raises(ShardError, match="the filter left out all that it tried"):
        next(iter(ds.filter(lambda _: False)))


@pytest.mark.slow
def test_mixture_without_a_good_sample_is_an_error_after_one_pass_of_each_source(
    daemon: Daemon, source: Path
) -> None:
    """A source of little weight takes longer to be tried, and may still have a good sample."""
    url = f"file://{source}/index.json"
    bad = ShardDataset(url, decode={"jpg": int}, on_error=ignore_and_continue, socket=daemon.socket)
    rare = ShardDataset(url, on_error=ignore_and_continue, socket=daemon.socket)
    weights = {"bad": 0.99, "rare": 0.01}
    mixture = Mixture({"bad": bad, "rare": rare}, weights, samples_per_epoch=10**6)
    assert next(iter(mixture))["__source__"] == "rare"
    with pytest.raises(ShardError, match="cannot read any sample in epoch 0"):
        next(
            iter(
                Mixture(
                    {"bad": bad, "worse": bad}, {"bad": 0.9, "worse": 0.1}, samples_per_epoch=10**9
                )
            )
        )


@mixed
def test_bad_samples_of_an_epoch_are_reported_once(
    daemon: Daemon, source: Path, order: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Replacements come from samples among which the bad ones are met again."""
    bad = set(KEYS[::3])
    read = []
    for rank in range(2):
        ds = ShardDataset(
            f"file://{source}/index.json",
            rank=rank,
            world_size=2,
            decode=lambda sample: sample if sample["__key__"] not in bad else int(sample["jpg"]),
            on_error=ignore_and_continue,
            socket=daemon.socket,
            **order,
        )
        read += keys_of(ds)
    assert len(read) == len(KEYS)
    assert set(read) == set(KEYS) - bad
    reports = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    numbers = [[int(word) for word in report.split() if word.isdecimal()] for report in reports]
    assert [sum(column) for column in zip(*numbers, strict=True)] == [0, len(bad)]


def test_rank_that_skipped_samples_resumes_exactly_with_the_state_of_another(
    daemon: Daemon, source: Path
) -> None:
    """A skipped sample is replaced in its own batch, so that ranks stay in step."""
    spoil(source, "bad sample")

    def make(rank: int) -> ShardLoader[list[str]]:
        dataset = ShardDataset(
            f"file://{source}/index.json",
            rank=rank,
            world_size=2,
            batch_size=2,
            on_error=ignore_and_continue,
            socket=daemon.socket,
        )
        return dataset.loader(num_workers=0, collate_fn=keys_of)

    whole = list(make(0))
    loaders = [make(rank) for rank in range(2)]
    steps = BAD * SAMPLES // 2 + 2
    for loader in loaders:
        assert len(list(islice(loader, steps))) == steps
    states = [loader.state_dict() for loader in loaders]
    resumed = make(0)
    resumed.load_state_dict(states)
    assert list(resumed) == whole[steps:]
    by_the_other = make(0)
    by_the_other.load_state_dict(states[1])
    assert list(by_the_other) == whole[steps:]


@pytest.mark.parametrize("fault", ["bad sample", "no tar"])
def test_a_handler_that_stops(daemon: Daemon, source: Path, fault: str) -> None:
    """The epoch ends there as if it were complete, and the next iteration reads the next."""
    spoil(source, fault)
    ds = ShardDataset(f"file://{source}/index.json", on_error=ignore_and_stop, socket=daemon.socket)
    before = KEYS[: BAD * SAMPLES + (2 if fault == "bad sample" else 0)]
    for epoch in (1, 2):
        assert keys_of(ds) == before
        assert ds.epoch == epoch


@pytest.mark.slow
@mixed
def test_a_reader_whose_whole_share_is_lost_gives_what_others_read(
    daemon: Daemon, source: Path, order: dict[str, Any]
) -> None:
    """Some readers have only the bad shard: ranks stay equal, and all good samples come."""
    spoil(source, "no tar")
    options = {"on_error": ignore_and_continue, "socket": daemon.socket, **order}
    datasets = [
        ShardDataset(f"file://{source}/index.json", rank=rank, world_size=8, **options)
        for rank in range(8)
    ]
    ranks = [keys_of(ds) for ds in datasets]
    assert [len(keys) for keys in ranks] == [SHARDS * SAMPLES // 8] * 8
    assert set().union(*ranks) == set(KEYS) - set(LOST)


@pytest.mark.slow
def test_trailing_data_are_ignored_where_the_config_says_so(tmp_path: Path, source: Path) -> None:
    """`ignore_trailing_data` in an [[origin]] table gives the samples before the tar's end."""
    spoil(source, "joined tars")
    config = tmp_path / "shardcache.toml"
    config.write_text(f'[[origin]]\nmatch = "file://{source}/"\nignore_trailing_data = true\n')
    with Daemon(tmp_path, "--config", str(config)) as lenient:
        read = keys_of(ShardDataset(f"file://{source}/{BAD}.tar", socket=lenient.socket))
    assert read == LOST[:3]
