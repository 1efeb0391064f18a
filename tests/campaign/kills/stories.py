"""Stories of daemons until they are killed: fetching, evicting, resuming, verifying, starting."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Sequence
from pathlib import Path

from campaign.kills.life import AMPLE, FLAGS, GONE, PART_BYTES, Source, Story
from support.disks.shim import CHANGES, Action, Op, Shim
from support.programs.daemon import Daemon
from support.programs.raw_session import RawSession
from support.programs.zygote import Zygote
from support.shards.tars import make_tar, random_samples
from support.stores.moto_s3 import MotoS3

SHARDS = 6
SAMPLES = 10
COMPRESSED = 4  # the number of the one that is

# A start asks for every folder anew; where they are all there, that changes nothing.
WITHOUT_FOLDERS = tuple(op for op in CHANGES if op is not Op.MKDIR)


def tar(number: int) -> bytes:
    """Return a tar of a little more than three parts."""
    return make_tar(random_samples(SAMPLES, {"bin": PART_BYTES // 3}, seed=number, first=number * SAMPLES))


def on_disk(folder: Path) -> Source:
    """Return a store that is a local folder."""
    folder.mkdir()
    tars, stored_bytes = {}, {}
    for number in range(SHARDS):
        packed = number == COMPRESSED
        path = folder / (f"{number}.tar.gz" if packed else f"{number}.tar")
        path.write_bytes(gzip.compress(tar(number), 1) if packed else tar(number))
        tars[f"file://{path}"] = tar(number)
        stored_bytes[f"file://{path}"] = path.stat().st_size
    return Source(tars, stored_bytes)


def on_s3(server: MotoS3) -> Source:
    """Return a bucket."""
    server.make_bucket("kills")
    tars = {server.put("kills", f"{number}.tar", tar(number)): tar(number) for number in range(3)}
    return Source(tars, {url: len(data) for url, data in tars.items()}, server.env())


def read(daemon: Daemon, urls: Sequence[str]) -> None:
    """Take the shards in order, and give each back."""
    with RawSession(daemon) as session:
        session.plan(list(urls), list(range(len(urls))))
        for position in range(len(urls)):
            lease = session.take(position)
            assert lease["type"] == "leased", lease
            session.send(type="release", lease=lease["lease"])
            session.settle()


def fetch(daemon: Daemon, source: Source) -> None:
    """Read everything."""
    read(daemon, list(source.tars))


def look_after(daemon: Daemon, source: Source) -> None:
    """Verify, read what was damaged again, evict a shard, count its samples."""
    urls = list(source.tars)
    daemon.request("POST", "/v1/verify", {"prefix": ""})
    read(daemon, urls[:1])
    daemon.request("POST", "/v1/evict", {"urls": urls[1:3]})
    daemon.request("POST", "/v1/index", {"urls": urls})


def pin(daemon: Daemon, source: Source) -> None:
    """Pin what is here and what is not, and take some of it back."""
    urls = list(source.tars)
    daemon.request("POST", "/v1/pin", {"urls": urls})
    daemon.request("POST", "/v1/unpin", {"urls": urls[:2]})


def idle(daemon: Daemon, source: Source) -> None:
    """Do nothing but start."""


def grow(zygote: Zygote, source: Source, folder: Path, numbers: Sequence[int], *, parts: int = 0) -> Path:
    """Return a cache folder that holds some shards whole, and so many parts of the one that comes after them."""
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
    shutil.copytree(cache, copy)
    victim = min(copy.glob("shards/*/*.tar"))
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.chmod(0o640)
    victim.write_bytes(data)
    victim.chmod(0o440)
    return copy


def older(cache: Path, copy: Path) -> Path:
    """Return a copy of a cache folder as releases left it that wrote no format."""
    shutil.copytree(cache, copy)
    (copy / "format").unlink()
    return copy


def stories(zygote: Zygote, server: MotoS3, folder: Path) -> list[Story]:
    """Return all of them, their stores and templates made below `folder`."""
    local, remote = on_disk(folder / "store"), on_s3(server)
    empty = grow(zygote, local, folder / "e", ())
    half = grow(zygote, local, folder / "h", (0, 1, 2), parts=2)
    whole = grow(zygote, local, folder / "w", range(SHARDS))
    some = f"{3.6 * len(tar(0)):.0f}"  # three shards and the parts of a fourth
    return [
        Story("first start", local, None, idle, AMPLE, CHANGES, stride=5),  # 256 folders are made
        Story("take over", local, older(whole, folder / "older"), idle, AMPLE, WITHOUT_FOLDERS),
        Story("pin", local, half, pin, AMPLE, WITHOUT_FOLDERS),
        Story("fetch", local, empty, fetch, AMPLE, WITHOUT_FOLDERS),
        Story("fetch from S3", remote, empty, fetch, AMPLE, WITHOUT_FOLDERS),
        Story("resume and evict", local, half, fetch, some, WITHOUT_FOLDERS),
        Story("verify, evict, count", local, damaged(whole, folder / "damaged"), look_after, AMPLE, WITHOUT_FOLDERS),
    ]
