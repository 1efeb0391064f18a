"""A table whose file is replaced between two runs: only its new rows are fetched on resume."""

import json
import logging
import os
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest

from shardcache.errors import UnmatchedKeyError
from shardcache_client.dataset import Joined, ShardDataset
from shardcache_client.table import Table
from support.programs.daemon import Daemon, eventually
from support.shards.reading import keys_of, write_index
from support.shards.tars import make_tar, random_samples
from support.stores.buckets import Bucket

COUNTS = (7, 5, 8)
SHARDS = [
    random_samples(count, {"wav": 3000}, first=sum(COUNTS[:number]))
    for number, count in enumerate(COUNTS)
]
KEYS = [str(sample["__key__"]) for sample in chain.from_iterable(SHARDS)]

FIRST = {key: {"text": f"first {key}"} for key in KEYS}
SECOND: dict[str, dict[str, Any]] = {
    key: {"text": f"second {key}", "score": int(key)} for key in [*KEYS, "900", "901"]
}


@pytest.fixture(autouse=True)
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the node's tables: one for each test."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path / "tmp" / f"shardcache-tables-{os.geteuid()}"


def lines(rows: Mapping[str, Mapping[str, Any]]) -> bytes:
    return b"".join(json.dumps({"id": key, **row}).encode() + b"\n" for key, row in rows.items())


class Place:
    """Shards, their index and a manifest, in a folder or in a bucket.

    Attributes:
        url: of the folder, or the bucket.
    """

    def __init__(self, folder: Path, bucket: Bucket | None) -> None:
        self._folder = folder
        self._bucket = bucket
        self.url = f"file://{folder}" if bucket is None else bucket.url
        for number, samples in enumerate(SHARDS):
            self.put(f"{number}.tar", make_tar(samples))
        write_index(folder, COUNTS)
        self.put("index.json", (folder / "index.json").read_bytes())

    def put(self, name: str, data: bytes) -> None:
        """Write a file, or replace it."""
        if self._bucket is None:
            (self._folder / name).write_bytes(data)
        else:
            self._bucket.put(name, data)


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.slow)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    bucket = request.getfixturevalue("moto") if request.param == "s3" else None
    folder = tmp_path / "set"
    folder.mkdir()
    return Place(folder, bucket)


@pytest.fixture
def own_daemon(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with the test's variables and the bucket's, which asks again only when told to."""
    with Daemon(tmp_path_factory.mktemp("d"), "--listing-ttl-s", "3600") as running:
        yield running


@pytest.mark.slow
def test_run_resumes_with_the_new_rows_and_fetches_only_these(
    place: Place, own_daemon: Daemon
) -> None:
    """The state holds where keys and order do, and cached shards get new values and columns."""

    def joined() -> Joined:
        audio = ShardDataset(
            f"{place.url}/index.json", socket=own_daemon.socket, shuffle=True, seed=3, batch_size=4
        )
        return Joined({"": audio, "row": Table(f"{place.url}/manifest.jsonl", key="id")})

    def loader() -> Any:
        return joined().loader(collate_fn=list)

    def fetched_bytes() -> int:
        own_daemon.await_publication()
        return int(own_daemon.status()["counters"]["origin_bytes"])

    place.put("manifest.jsonl", lines(FIRST))
    whole = [keys_of(batch) for batch in loader()]
    stopped = loader()
    first = list(islice(stopped, 2))
    state = json.loads(json.dumps(stopped.state_dict()))
    before_bytes = fetched_bytes()

    place.put("manifest.jsonl", lines(SECOND))
    # The processes of a run, which begin within seconds of each other, have one version.
    eventually(lambda: "row.score" in next(iter(joined())))
    resumed = loader()
    resumed.load_state_dict(state)
    rest = list(resumed)

    assert [keys_of(batch) for batch in first + rest] == whole
    assert all(sample["row.text"] == f"first {sample['__key__']}" for sample in chain(*first))
    for sample in chain(*rest):
        assert sample["row.text"] == f"second {sample['__key__']}"
        assert sample["row.score"] == int(sample["__key__"])
    assert fetched_bytes() - before_bytes == len(lines(SECOND))


def test_rows_of_one_key_are_logged_where_samples_are_left_out(
    place: Place, own_daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, when the table is read: `missing="skip"` would lose their samples without a word."""
    place.put("manifest.jsonl", lines(FIRST) + lines({KEYS[3]: {"text": "again"}}))

    def joined(**options: Any) -> Joined:
        audio = ShardDataset(f"{place.url}/index.json", socket=own_daemon.socket, even=None)
        return Joined({"": audio, "row": Table(f"{place.url}/manifest.jsonl", key="id")}, **options)

    with caplog.at_level(logging.WARNING, "shardcache"):
        assert keys_of(joined(missing="skip")) == KEYS[:3] + KEYS[4:]
    assert f"1 of the rows of {place.url}/manifest.jsonl" in caplog.text
    with pytest.raises(UnmatchedKeyError, match="2 rows have its key"):
        list(joined())
