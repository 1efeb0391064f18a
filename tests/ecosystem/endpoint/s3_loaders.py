"""Other projects' loaders over data in their own formats: arguments are LOADER, URL and FOLDER.

Each prints, as JSON, the numbers of the samples of an epoch that are as they were written, in the
order in which they came. With `write` in place of the url, the data is made in the folder.
"""

import hashlib
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.peers import mosaicml, write_litdata, write_mosaicml

SAMPLES = 600
CHUNK_BYTES = 1_000_000  # about, of each loader's files


def body(number: int) -> bytes:
    return random.Random(number).randbytes(10_000)


def is_right(number: int, data: Any) -> bool:
    return hashlib.sha256(data).digest() == hashlib.sha256(body(number)).digest()


def write(name: str, folder: Path) -> None:
    """Write the samples into a folder in a loader's format."""
    numbers = range(SAMPLES)
    rows = ({"number": number, "body": body(number)} for number in numbers)
    if name == "mosaicml":
        write_mosaicml(folder, {"number": "int", "body": "bytes"}, rows, size_limit=CHUNK_BYTES)
    elif name == "litdata":
        write_litdata(folder, rows, chunk_bytes=CHUNK_BYTES)
    else:
        for number in numbers:
            (folder / f"{number:06d}.bin").write_bytes(body(number))


def of_mosaicml(url: str, folder: Path) -> Iterator[tuple[int, bytes]]:
    """Shards that it downloads into a folder of its own."""
    streaming = mosaicml()
    dataset = streaming.StreamingDataset(
        remote=url, local=str(folder), shuffle=True, shuffle_seed=7, batch_size=8
    )
    for sample in dataset:
        yield sample["number"], sample["body"]


def of_litdata(url: str, folder: Path) -> Iterator[tuple[int, bytes]]:
    """Chunks that it downloads into a folder of its own.

    By obstore, to which it does not say that an endpoint may be plain HTTP, and has no option for
    that.
    """
    from litdata import StreamingDataset
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True

    place = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}
    dataset = StreamingDataset(
        url, cache_dir=str(folder), shuffle=True, seed=7, storage_options=place
    )
    for sample in dataset:
        yield sample["number"], sample["body"]


def of_s3torchconnector(url: str, _folder: Path) -> Iterator[tuple[int, bytes]]:
    """An object for each sample, by number and then in order."""
    from s3torchconnector import S3IterableDataset, S3MapDataset

    place: dict[str, Any] = {
        "region": os.environ["AWS_REGION"],
        "endpoint": os.environ["AWS_ENDPOINT_URL"],
    }
    by_number = S3MapDataset.from_prefix(url, **place)
    assert is_right(SAMPLES - 1, by_number[SAMPLES - 1].read())
    for item in S3IterableDataset.from_prefix(url, **place):
        yield int(Path(item.key).stem), item.read()


LOADERS: dict[str, Callable[[str, Path], Iterator[tuple[int, bytes]]]] = {
    "mosaicml": of_mosaicml,
    "litdata": of_litdata,
    "s3torchconnector": of_s3torchconnector,
}


def main() -> None:
    name, url, folder = sys.argv[1:]
    if url == "write":
        write(name, Path(folder))
        return
    print(
        json.dumps(
            [number for number, data in LOADERS[name](url, Path(folder)) if is_right(number, data)]
        )
    )


if __name__ == "__main__":
    main()
