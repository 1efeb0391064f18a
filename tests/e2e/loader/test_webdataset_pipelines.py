"""Pipelines of webdataset over a daemon give what webdataset gives over the files."""

import functools
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import webdataset as wds
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchdata.stateful_dataloader import StatefulDataLoader
from webdataset.cache import StreamingOpen

from shardcache.errors import ConfigError
from shardcache_client.webdataset import WebDataset
from support.cases import first_quick
from support.programs.cli import shardcache
from support.programs.daemon import Daemon
from support.shards.reading import keys_of
from support.shards.tars import make_tar, random_samples

COUNTS = (5, 11, 1, 8)
TOTAL = sum(COUNTS)
Pipeline = Callable[[Any], Any]


@pytest.fixture(scope="module")
def source(folder: Path) -> Path:
    """A folder of shards with uneven numbers of samples, an empty one and one that is no tar."""
    source = folder / "uneven"
    source.mkdir()
    first = 0
    for number, count in enumerate(COUNTS):
        samples = random_samples(count, {"bin": 40}, first=first)
        (source / f"{number}.tar").write_bytes(
            make_tar([{**s, "txt": str(s["__key__"]).encode()} for s in samples])
        )
        first += count
    (source / "broken.tar").write_bytes(b"x" * 20_000)
    (source / "empty.tar").write_bytes(make_tar([]))
    return source


@pytest.fixture(scope="module")
def counted(source: Path, daemon: Daemon) -> str:
    """The shards' pattern, once the daemon has counted their samples."""
    url = f"file://{source}/{{0..3}}.tar"
    assert shardcache("warm", url, f"file://{source}/empty.tar", socket=daemon.socket).code == 0
    return url


@pytest.fixture
def dataset(counted: str, daemon: Daemon) -> Callable[..., WebDataset]:
    """Constructor of the drop-in over the shards."""
    return functools.partial(WebDataset, counted, socket=daemon.socket)


def theirs(urls: str | list[str], *arguments: Any, **more: Any) -> wds.WebDataset:
    """Return webdataset's own over files, which it would leave open."""
    pipeline = wds.WebDataset(urls, *arguments, **{"shardshuffle": False} | more)
    pipeline.pipeline = [
        opened if isinstance(stage, StreamingOpen) else stage for stage in pipeline.pipeline
    ]
    return pipeline


def opened(shards: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Do what webdataset's StreamingOpen does, and close the files."""
    for shard in shards:
        with open(shard["url"].removeprefix("file:"), "rb") as stream:
            yield shard | {"stream": stream, "local_path": shard["url"].removeprefix("file:")}


def text_of(sample: dict[str, Any]) -> str:
    """Return what a sample says."""
    return str(sample["text"])


def plain(item: Any) -> Any:
    """Return an item of a pipeline in comparable form, without the url."""
    if isinstance(item, dict):
        return {name: plain(value) for name, value in item.items() if name != "__url__"}
    if isinstance(item, list | tuple):
        return [plain(value) for value in item]
    return item.tolist() if hasattr(item, "tolist") else item


@pytest.mark.parametrize(
    "stages",
    [
        lambda pipe: pipe,
        lambda pipe: wds.DataPipeline(
            pipe, wds.decode(), wds.to_tuple("__key__", "txt"), wds.batched(4)
        ),
        lambda pipe: pipe.decode().to_tuple("__key__", "txt", "bin"),
        lambda pipe: pipe.rename(text="txt").map(text_of).listed(4),
        lambda pipe: pipe.to_tuple("__key__", "txt").batched(4),
        lambda pipe: (
            pipe.select(lambda sample: sample["txt"] > b"000009")
            .to_tuple("txt")
            .batched(4, partial=False)
        ),
        lambda pipe: pipe.shuffle(6, seed=3),
        lambda pipe: pipe.slice(7).with_epoch(20),
        lambda pipe: pipe.repeat(2),
    ],
)
def test_stages_give_what_they_give_in_webdataset(
    dataset: Any, source: Path, stages: Pipeline
) -> None:
    """The same items in the same order, whatever stages follow."""
    expected = plain(list(stages(theirs(f"{source}/{{0..3}}.tar"))))
    assert len(expected) >= 3
    assert plain(list(stages(dataset()))) == expected


@pytest.mark.parametrize("wanted", [".txt", "4.bin", ".none"])
def test_selected_members_are_those_that_webdataset_selects(
    dataset: Any, source: Path, wanted: str
) -> None:
    """`select_files` sees each member's name, and samples without any member left vanish."""
    arguments: dict[str, Any] = {
        "select_files": lambda name: name.endswith(wanted),
        "empty_check": False,
    }
    assert plain(list(dataset(**arguments))) == plain(
        list(theirs(f"{source}/{{0..3}}.tar", **arguments))
    )


@pytest.mark.parametrize(
    "handler", first_quick([wds.ignore_and_continue, wds.warn_and_continue, wds.ignore_and_stop])
)
@pytest.mark.filterwarnings("ignore")
def test_webdatasets_handlers_decide(
    source: Path, daemon: Daemon, handler: Callable[[Exception], bool]
) -> None:
    """A shard that cannot be read is passed over, or ends the epoch, as it does in webdataset."""
    names = [f"{source}/{name}.tar" for name in ("0", "broken", "2")]
    ours = WebDataset(names, handler, shardshuffle=False, socket=daemon.socket)
    assert keys_of(ours) == keys_of(theirs(names, handler))


def test_local_shards_are_named_as_in_webdataset(
    source: Path, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`file:` urls, even relative ones, and paths work, and samples have `__local_path__`."""
    monkeypatch.chdir(source)
    for url in (f"file:{source}/0.tar", "file:0.tar", f"{source}/0.tar", Path("0.tar")):
        expected = list(theirs(f"file:{source}/0.tar"))
        assert [sample["__local_path__"] for sample in expected] == [f"{source}/0.tar"] * COUNTS[0]
        assert plain(list(WebDataset(url, socket=daemon.socket))) == plain(expected)
        selected = list(
            WebDataset(url, socket=daemon.socket, select_files=lambda name: name.endswith("txt"))
        )
        assert {name for sample in selected for name in sample} == {
            "__key__",
            "__url__",
            "__local_path__",
            "txt",
        }


@pytest.mark.slow
def test_a_missing_shard_is_a_file_not_found_error_of_the_iteration(
    tmp_path: Path, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in webdataset, making the pipeline does not fail; webdataset's handlers print the url."""
    monkeypatch.chdir(tmp_path)
    for url in ("missing.tar", f"file:{tmp_path}/missing.tar", f"{tmp_path}/missing-{{0..1}}.tar"):
        pipeline = WebDataset(url, socket=daemon.socket)
        with pytest.raises(FileNotFoundError, match="missing"):
            list(pipeline)
    with pytest.warns(UserWarning, match=f"NotFoundError.*url='{tmp_path}/missing.tar'"):
        list(WebDataset("missing.tar", wds.warn_and_continue, socket=daemon.socket))


def test_each_rank_reads_everything_without_a_nodesplitter(
    dataset: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in webdataset, where each node then opens every shard."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert len(keys_of(dataset(nodesplitter=wds.split_by_node))) == (TOTAL + 1) // 2
    assert len(keys_of(dataset(nodesplitter=None))) == TOTAL


def test_resampled_never_ends(dataset: Any) -> None:
    """An epoch is what `with_epoch` says, over rounds that each have every sample once."""
    rounds = 3
    keys = keys_of(dataset(resampled=True).with_epoch(rounds * TOTAL))
    by_round = [keys[start : start + TOTAL] for start in range(0, len(keys), TOTAL)]
    assert [len(set(part)) for part in by_round] == [TOTAL] * rounds
    assert by_round[0] != by_round[1] != by_round[2]


def test_resampled_ranks_count_their_rounds_alone(
    dataset: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank that reads ahead of the other is not warned of epochs, as its user has none."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(server.port),
    }
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    endless = dataset(resampled=True).with_epoch(2 * TOTAL)
    for _ in range(2):
        assert len(set(keys_of(endless))) > TOTAL // 2
    assert server.num_keys() > 1, "the ranks share a store, and compare their options over it"
    assert not caplog.records


def test_shards_are_shuffled_by_the_seed_and_the_epoch(
    dataset: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same on every rank and in every run; $WDS_SEED is the seed, as in webdataset."""
    first = keys_of(dataset(shardshuffle=100, seed=5))
    assert keys_of(dataset(shardshuffle=100, seed=5)) == first
    monkeypatch.setenv("WDS_SEED", "5")
    again = dataset(shardshuffle=100)
    assert keys_of(again) == first
    assert keys_of(again) != first  # the next epoch
    again.set_epoch(0)
    assert keys_of(again.map(dict)) == first


def test_a_cache_folder_is_left_to_the_daemon(
    dataset: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder that webdataset would fill needs not even exist; a line in the log says so."""
    assert len(keys_of(dataset(cache_dir="/nowhere/at/all"))) == TOTAL
    assert "cache_dir" in caplog.text


@pytest.mark.parametrize("workers", first_quick([0, 2]))
@pytest.mark.filterwarnings("ignore:.*set_vital.*")
def test_a_state_taken_early_in_a_later_epoch(dataset: Any, workers: int) -> None:
    """A StatefulDataLoader asks before the first sample, and gets the epoch that begins."""

    def loader() -> Any:
        pipeline = dataset(shardshuffle=100, seed=3, batch_size=4).map(dict)
        return StatefulDataLoader(pipeline, batch_size=4, num_workers=workers, collate_fn=list)

    whole = loader()
    first = loader()
    list(whole), list(first)
    expected = list(whole)
    batches = iter(first)
    for taken in (0, 1):
        again = loader()
        again.load_state_dict(first.state_dict())
        assert list(again) == expected[taken:]
        next(batches)


def letters(samples: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Split each sample into the letters of its key."""
    for sample in samples:
        yield from sample["__key__"]


@pytest.mark.parametrize(
    ("stages", "named"),
    [
        (lambda pipe: pipe.map(dict).compose(letters).select(bool), "letters"),
        (lambda pipe: pipe.map(list).unlisted(), "unlisted"),
        (lambda pipe: pipe.batched(2).unbatched(), "unbatched"),
    ],
)
def test_state_after_a_stage_that_splits_samples_is_refused(
    dataset: Any, stages: Pipeline, named: str
) -> None:
    """A source is past a sample that is half done: its other items would be lost on resume."""
    pipeline = stages(dataset())
    next(iter(pipeline))
    for refused in (pipeline.state_dict, lambda: pipeline.load_state_dict(dataset().state_dict())):
        with pytest.raises(ConfigError, match=rf"with the stage {named}[\s\S]*\.map\(\)"):
            refused()


@pytest.mark.parametrize(
    "stages",
    [
        lambda pipe: pipe.decode().rename(text="txt").map(dict).select(bool).map_dict(text=str),
        lambda pipe: (
            pipe.rename_keys(text="txt", keep_unselected=True).compose(wds.info(n=0)).slice(100)
        ),
    ],
)
def test_stages_that_give_item_by_item_resume_exactly(dataset: Any, stages: Pipeline) -> None:
    """The samples after a saved state are those that would have come."""
    pipeline = stages(dataset(select_files=lambda name: name.endswith("txt")))
    items = iter(pipeline)
    list(islice(items, 7))
    again = stages(dataset(select_files=lambda name: name.endswith("txt")))
    again.load_state_dict(pipeline.state_dict())
    assert keys_of(again) == keys_of(items)


def test_samples_in_a_buffer_are_reported_as_lost(
    dataset: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A shuffle buffer has samples that the state takes for read: whoever loads it is told."""
    pipeline = dataset().shuffle(5)
    pipeline.load_state_dict(dataset().state_dict())
    assert "shuffle_window" in caplog.text
