"""Stories of daemons that fetch, keep and lose whole shards."""

import gzip
from collections.abc import Sequence
from pathlib import Path

from campaign.kill_audit import Source
from campaign.lives import AMPLE, FLAGS, GONE, PART_BYTES, SAMPLES, Story, copy_folder
from support.disks.shim import CHANGES, Action, Op, Shim
from support.programs.daemon import Daemon
from support.programs.raw_session import RawSession
from support.programs.zygote import Zygote
from support.shards.tars import make_tar, random_samples
from support.stores.buckets import MotoS3

SHARDS = 6
COMPRESSED = 4  # the number of the one that is


def tar(number: int, samples: int = SAMPLES) -> bytes:
    """Return a tar; with as many samples as usual, of a little more than three parts."""
    sizes = {"bin": PART_BYTES // 3}
    return make_tar(random_samples(samples, sizes, seed=number, first=number * samples))


def on_disk(folder: Path) -> Source:
    folder.mkdir()
    tars = {}
    stored_bytes = {}
    for number in range(SHARDS):
        data = tar(number)
        path = folder / f"{number}.tar"
        if number == COMPRESSED:
            path = folder / f"{number}.tar.gz"
            path.write_bytes(gzip.compress(data, 1))
        else:
            path.write_bytes(data)
        url = f"file://{path}"
        tars[url] = data
        stored_bytes[url] = path.stat().st_size
    return Source(tars, stored_bytes)


def on_s3(server: MotoS3, bucket: str, tars: Sequence[bytes]) -> Source:
    server.make_bucket(bucket)
    stored = {server.put(bucket, f"{number}.tar", data): data for number, data in enumerate(tars)}
    return Source(stored, {url: len(data) for url, data in stored.items()}, server.env())


def read(daemon: Daemon, urls: Sequence[str]) -> None:
    with RawSession(daemon) as session:
        session.plan(list(urls), list(range(len(urls))))
        for position in range(len(urls)):
            lease = session.take(position)
            assert lease["type"] == "leased", lease
            session.send(type="release", lease=lease["lease"])
            session.settle()


def fetch(daemon: Daemon, source: Source) -> None:
    read(daemon, list(source.tars))


def look_after(daemon: Daemon, source: Source) -> None:
    """Verify, read what was damaged again, evict a shard, count its samples."""
    urls = list(source.tars)
    daemon.request("POST", "/v1/verify", {"prefix": ""})
    read(daemon, urls[:1])
    daemon.request("POST", "/v1/evict", {"urls": urls[1:3]})
    daemon.request("POST", "/v1/index", {"urls": urls})


def pin(daemon: Daemon, source: Source) -> None:
    urls = list(source.tars)
    daemon.request("POST", "/v1/pin", {"urls": urls})
    daemon.request("POST", "/v1/unpin", {"urls": urls[:2]})


def idle(daemon: Daemon, source: Source) -> None:
    """Do nothing but start."""


def grow(
    zygote: Zygote, source: Source, folder: Path, numbers: Sequence[int], *, parts: int = 0
) -> Path:
    """Return a cache folder that holds some shards whole.

    Args:
        parts: how many parts it has of the shard that comes after them.
    """
    folder.mkdir()
    shim = Shim(folder / "shim", folder / "cache")
    env = source.env | {"SHIM_CONTROL": str(shim.path)}
    urls = list(source.tars)
    with Daemon(folder, *FLAGS, capacity=AMPLE, env=env, spawn=zygote.spawn) as daemon:
        read(daemon, [urls[number] for number in numbers])
        if parts:
            shim.arm(Action.KILL_BEFORE, at=parts + 2, ops=(Op.WRITE,), match=".journal")
            try:
                read(daemon, urls[len(numbers) :])
            except GONE:
                assert shim.acted
    return folder / "cache"


def damaged(cache: Path, copy: Path) -> Path:
    """Return a copy of a cache folder in which one bit of one shard is flipped."""
    copy_folder(cache, copy)
    victim = min(copy.glob("shards/*/*.tar"))
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.chmod(0o640)
    victim.write_bytes(data)
    victim.chmod(0o440)
    return copy


def older(cache: Path, copy: Path) -> Path:
    """Return a copy of a cache folder without its format, as an older release left it."""
    copy_folder(cache, copy)
    (copy / "format").unlink()
    return copy


def stories(zygote: Zygote, server: MotoS3, folder: Path) -> list[Story]:
    """Return all of them, their stores and templates made below `folder`."""
    local = on_disk(folder / "store")
    remote = on_s3(server, "kills", [tar(number) for number in range(3)])
    empty = grow(zygote, local, folder / "e", ())
    half = grow(zygote, local, folder / "h", (0, 1, 2), parts=2)
    whole = grow(zygote, local, folder / "w", range(SHARDS))
    spoilt = damaged(whole, folder / "damaged")
    some = f"{3.6 * len(tar(0)):.0f}"  # three shards and the parts of a fourth
    return [
        Story("first start", local, None, idle, AMPLE, CHANGES, stride=5),  # 256 folders are made
        Story("take over", local, older(whole, folder / "older"), idle, AMPLE),
        Story("pin", local, half, pin, AMPLE),
        Story("fetch", local, empty, fetch, AMPLE),
        Story("fetch from S3", remote, empty, fetch, AMPLE),
        Story("resume and evict", local, half, fetch, some),
        Story("verify, evict, count", local, spoilt, look_after, AMPLE),
    ]
