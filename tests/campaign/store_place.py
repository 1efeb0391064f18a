"""A store behind a proxy that spoils its answers, a daemon, and readers that compare every byte."""

import hashlib
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from campaign.harness import Result
from shardcache.errors import ShardcacheError, ShardTimeoutError
from shardcache.shared.protocol import ShardRef
from shardcache_client.daemon.choice import DaemonChoice
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.patience import Patience
from shardcache_client.daemon.session import Session, resolve
from shardcache_client.dataset import ShardDataset
from shardcache_client.order.shards.declared_plan import Plan
from shardcache_client.order.shards.manifest import Manifest
from support.programs.daemon import Daemon, eventually
from support.programs.guard import GUARD_S
from support.shards.tars import make_tar, random_samples
from support.stores.faulty_proxy import FaultyProxy
from support.stores.mischief import Mischief
from support.stores.object_servers import AzureServer, GoogleServer, HubServer, ObjectServer
from support.stores.seaweedfs import SeaweedFS

PART_BYTES = 64 * 1024
SAMPLES = 10
HANG_S = GUARD_S
_BUCKET = "campaign"
_READERS = 8
_FLAGS = (
    "--part-size",
    str(PART_BYTES),
    "--attempts",
    "4",
    "--stall-timeout-s",
    "1",
    "--listing-ttl-s",
    "0",
    "--log-level",
    "error",
)


def shard(number: int, *, edition: int = 0) -> bytes:
    """Return a tar that takes a little less than four parts; all of them have the same size."""
    return make_tar(samples(number, edition=edition))


def samples(number: int, *, edition: int = 0) -> list[dict[str, bytes | str]]:
    made = random_samples(SAMPLES, {"bin": 24_000}, seed=edition, first=number * SAMPLES)
    return [dict(sample) for sample in made]


@dataclass(frozen=True, slots=True)
class Failure:
    """A shard that did not come, and why."""

    number: int
    url: str
    error: ShardcacheError


class StorePlace:
    """S3: every other shard has a CRC32 in the store; of the rest the ETag is all that is known."""

    prefix: ClassVar[str] = f"s3://{_BUCKET}/"
    version: ClassVar[str] = "etag"  # header of the version in answers
    # Wrong samples are noticed when the shard is whole; who reads it as it arrives has had them by
    # then.
    wrong_bytes: ClassVar[set[Mischief]] = {Mischief.FLIP, Mischief.OTHER_BYTES}

    def __init__(self, folder: Path, shards: int, stack: ExitStack) -> None:
        self.bodies = [
            shard(number) for number in range(shards)
        ]  # the shards; `urls` and `keys` go with them
        self.keys = [f"{number:04d}.tar" for number in range(shards)]
        self.urls = [self.prefix + key for key in self.keys]
        self._former: dict[int, bytes] = {}
        self._due: set[int] = set()
        self._folder = folder
        self._stack = stack
        self._others: dict[type[StorePlace], StorePlace] = {}
        upstream_url = self._serve()
        for number, body in enumerate(self.bodies):
            self.put(number, body)
        objects = dict(zip(self.keys, self.bodies, strict=True))
        objects |= {
            hashlib.sha256(body).hexdigest(): body for body in self.bodies
        }  # the Hub's names of them
        self.proxy = stack.enter_context(FaultyProxy(upstream_url))
        self.proxy.objects = objects
        self.proxy.other = shard(shards)
        self.proxy.version = self.version
        self.proxy.late_s = 0.3
        self.proxy.drip_s = 0.05
        self.daemon = stack.enter_context(Daemon(folder, *_FLAGS, env=self._env()))
        eventually(lambda: not self.read(Result("nothing")), limit_s=HANG_S)

    def other(self, kind: "type[StorePlace]") -> "StorePlace":
        """Return the same with another store, started when it is first wanted."""
        if kind not in self._others:
            folder = self._folder / kind.prefix[:2]
            folder.mkdir()
            self._others[kind] = kind(folder, len(self.bodies), self._stack)
        return self._others[kind]

    def _serve(self) -> str:
        """Start the store; return the address that the proxy hides."""
        self._server = self._stack.enter_context(SeaweedFS(self._folder))
        self._server.make_bucket(_BUCKET)
        # It stores objects as older ones did: without a checksum.
        plain_client = self._server.connect(request_checksum_calculation="when_required")
        self._plain_client = self._stack.enter_context(closing(plain_client))
        return self._server.endpoint_url

    def _env(self) -> Mapping[str, str]:
        """Return the variables by which the daemon finds the store, with the proxy in between."""
        return self.proxy.env(self._server.env())

    def put(self, number: int, body: bytes) -> None:
        """Store a shard past the proxy."""
        client = self._server.client if number % 2 else self._plain_client
        client.put_object(Bucket=_BUCKET, Key=self.keys[number], Body=body)

    def replace(self, number: int, body: bytes, *, before: int, result: Result) -> None:
        """Have a shard replaced before its part from byte `before` on is asked for again."""

        def act() -> None:
            self.put(number, body)
            self._due.discard(number)
            result.injected += 1

        self._due.add(number)
        self._former[number] = self.bodies[number]
        self.bodies[number] = body
        self.proxy.before(act, key=self.keys[number], start=before)

    def settle(self) -> None:
        """Replace the shards of which nobody asked for that part; only the new ones are right."""
        self.proxy.heal()
        for number in self._due:
            self.put(number, self.bodies[number])
        if self._due:
            self.evict()  # a cached one may be served until the store has answered
        self._due.clear()
        self._former.clear()

    def evict(self) -> None:

        def empty() -> bool:
            self.daemon.request("POST", "/v1/evict", {"urls": self.urls})
            status = self.daemon.status()
            return not (
                status["transfers"] or status["cache"]["shards"]
            )  # a transfer outlives who asked for it

        try:
            eventually(empty, limit_s=HANG_S)
        except TimeoutError as exn:
            status = self.daemon.status()
            exn.add_note(f"{status['transfers']}; {status['jobs']}; {self.daemon.shards()}")
            raise

    def read(self, result: Result, numbers: Iterable[int] | None = None) -> list[Failure]:
        """Read shards by several readers at a time, compare them with the store's, and count what
        is not right.

        Returns those that did not come; a typed error for them is no harm.
        """
        wanted = list(range(len(self.urls)) if numbers is None else numbers)
        shares = [wanted[first::_READERS] for first in range(min(_READERS, len(wanted)))]
        with ThreadPoolExecutor(_READERS) as pool:
            return [
                failure
                for some in pool.map(lambda share: self._read(result, share), shares)
                for failure in some
            ]

    def recover(self, result: Result, failures: Sequence[Failure]) -> None:
        """Heal the store, and take the time until each shard that did not come is read right."""
        self.proxy.heal()
        healed_s = time.monotonic()
        for failure in failures:
            while again := self.read(result, [failure.number]):
                if time.monotonic() - healed_s > HANG_S:
                    result.fail(
                        "lost", f"{failure.url} does not come from a healed store: {again[0].error}"
                    )
                    break
            else:
                result.recovery_s.append(time.monotonic() - healed_s)

    def list_all(self, result: Result) -> bool:
        """Ask the daemon for all shards by their prefix, and return whether they came."""
        try:
            found = resolve(
                DaemonChoice(self.daemon.socket), ReaderIdentity("campaign"), [self.prefix], HANG_S
            )
        except ShardcacheError as exn:
            if type(exn) is ShardcacheError or exn.url is None:
                result.fail("untyped", f"{result.fault}: {exn!r}")
            return False
        if [ref.url for ref in found] != self.urls:
            result.fail(
                "lost", f"{result.fault}: {len(found)} of {len(self.urls)} shards are listed"
            )
        return True

    def _read(self, result: Result, numbers: Sequence[int]) -> list[Failure]:
        session = Session(
            DaemonChoice(self.daemon.socket), ReaderIdentity("campaign"), Patience(HANG_S)
        )
        try:
            session.declare(Plan.of(Manifest.of(map(ShardRef, self.urls)), 0, numbers))
            outcomes = [
                self._compare(result, session, at, number) for at, number in enumerate(numbers)
            ]
            return [outcome for outcome in outcomes if outcome is not None]
        finally:
            session.close()

    def _compare(
        self, result: Result, session: Session, position: int, number: int
    ) -> Failure | None:
        lease = session.lease(position)
        try:
            grant = session.wait(lease)
        except ShardcacheError as exn:
            self._judge(result, number, exn)
            return Failure(number, self.urls[number], exn)
        if Path(grant["path"]).read_bytes() not in (self.bodies[number], self._former.get(number)):
            result.fail("wrong", f"{result.fault}: {self.urls[number]} was served with wrong bytes")
        session.release(lease)
        return None

    def _judge(self, result: Result, number: int, exn: ShardcacheError) -> None:
        if isinstance(exn, ShardTimeoutError):
            result.fail("hangs", f"{result.fault}: {exn}")
        elif type(exn) is ShardcacheError or exn.url != self.urls[number] or not exn.message:
            result.fail("untyped", f"{result.fault}: {exn!r} for {self.urls[number]}")


class GooglePlace(StorePlace):
    """Google's store, in a bucket that anyone may read; every shard has a CRC32C."""

    prefix = f"gs://{_BUCKET}/"
    version = "x-goog-generation"
    _objects: ObjectServer

    def _serve(self) -> str:
        self._objects = server = self._stack.enter_context(GoogleServer())
        server.public.add(_BUCKET)
        return server.endpoint_url

    def _env(self) -> Mapping[str, str]:
        return {"STORAGE_EMULATOR_HOST": self.proxy.endpoint_url, "NO_GCE_CHECK": "true"}

    def put(self, number: int, body: bytes) -> None:
        self._objects.put(f"/{_BUCKET}/{self.keys[number]}", body)


class AzurePlace(GooglePlace):
    """Azure's store, by a shared access signature; every shard has an MD5."""

    prefix = f"az://{_BUCKET}/"
    version = "etag"

    def _serve(self) -> str:
        self._objects = self._stack.enter_context(AzureServer())
        return self._objects.endpoint_url

    def _env(self) -> Mapping[str, str]:
        account = f"BlobEndpoint={self.proxy.endpoint_url}/;SharedAccessSignature={AzureServer.SAS}"
        return {"AZURE_STORAGE_CONNECTION_STRING": account}


class HubPlace(StorePlace):
    """The Hub; the proxy is before the server that it leads to, by urls of which 64 are valid."""

    prefix = "hf://datasets/org/set/"
    wrong_bytes = StorePlace.wrong_bytes | {
        Mischief.OTHER_OBJECT
    }  # that server's versions are not the Hub's

    def _serve(self) -> str:
        self._hub = self._stack.enter_context(HubServer())
        self._hub.content.valid_urls = 64
        return self._hub.content.endpoint_url

    def _env(self) -> Mapping[str, str]:
        self._hub.content_url = self.proxy.endpoint_url
        return {"HF_ENDPOINT": self._hub.endpoint_url, "HF_TOKEN": HubServer.TOKEN}

    def put(self, number: int, body: bytes) -> None:
        self._hub.put_lfs(f"/datasets/org/set/resolve/main/{self.keys[number]}", body)


class Reading:
    """Reads every shard once, goes on without those that fail, and asks again at the end."""

    def __init__(self, place: StorePlace, result: Result) -> None:
        self._place = place
        self._result = result
        shards = {number: samples(number) for number in range(len(place.urls))}
        self._shard_of = {
            str(each["__key__"]): number for number, some in shards.items() for each in some
        }
        self._bins = {
            str(each["__key__"]): each["bin"] for some in shards.values() for each in some
        }
        self._seen: Counter[str] = Counter()
        self._failed: set[str] = set()

    def epoch(self) -> None:
        """Read while answers are spoiled: all samples of shards that do not fail come once."""
        self._read()
        for key, number in self._shard_of.items():
            if self._seen[key] != 1 and not (
                self._seen[key] == 0 and self._place.urls[number] in self._failed
            ):
                self._result.fail("lost", f"sample {key} came {self._seen[key]} times")

    def make_up(self) -> None:
        """Read all of a healed store."""
        healed_s = time.monotonic()
        self._failed.clear()
        self._seen.clear()
        self.epoch()
        for url in self._failed:
            self._result.fail("lost", f"{url} does not come from a healed store")
        self._result.recovery_s.append(time.monotonic() - healed_s)

    def _read(self) -> None:
        urls = self._place.urls
        socket = self._place.daemon.socket
        for sample in ShardDataset(
            urls, socket=socket, even=None, timeout_s=HANG_S, on_error=self._go_on
        ):
            key = sample["__key__"]
            self._seen[key] += 1
            if sample["bin"] != self._bins.get(key):
                self._result.fail("wrong", f"sample {key} is not the one in the store")

    def _go_on(self, exn: Exception) -> bool:
        if isinstance(exn, ShardTimeoutError):
            self._result.fail("hangs", str(exn))
        elif not isinstance(exn, ShardcacheError) or exn.url is None:
            self._result.fail("untyped", repr(exn))
        if isinstance(exn, ShardcacheError) and exn.url is not None:
            self._failed.add(exn.url)
        return True
