"""Any file through the cache, by its path: `cached_paths` and `open_cached`.

These functions are for libraries that read files themselves. For a path, the daemon fetches the
whole object into the cache, and holds the file there while the caller uses the path. Of an open
file, it fetches the parts that are read.
"""

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial

from shardcache.shared.protocol import Wanted
from shardcache.shared.urls.local_urls import absolute_url, absolute_urls
from shardcache_client.arguments.other_words import OTHER_WORDS
from shardcache_client.arguments.values import DAEMONS, JOB, PATH, SECONDS, URL, URLS, checked
from shardcache_client.daemon.choice import DaemonChoice, DaemonName
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.patience import Patience
from shardcache_client.daemon.session import resolve
from shardcache_client.files.cached_file import CachedFile, session_of
from shardcache_client.files.object_reader import ObjectReader
from shardcache_client.ranks.environment import job_name

# Rules for the arguments that both functions have.
_RULES = {"job": JOB.or_none(), "socket": PATH.or_none(), "daemon": DAEMONS, "timeout_s": SECONDS}


@checked(OTHER_WORDS, urls=URLS, **_RULES)
@contextmanager
def cached_paths(
    urls: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    job: str | None = None,
    socket: str | os.PathLike[str] | None = None,
    daemon: DaemonName = "auto",
    timeout_s: float = 300.0,
) -> Iterator[list[str]]:
    """Fetch files and hold them in the cache until the `with` block ends.

    Yields their paths, in the order of `urls`. The block begins once every file is on local disk
    and verified:

        with cached_paths("s3://bucket/llama/model-{1..4}.safetensors") as paths:
            weights = [safetensors.torch.load_file(path) for path in paths]

    Each file is fetched whole, because a library that opens a path may read any of its bytes. To
    fetch only what is read, use `open_cached` or fsspec.

    A path ends with the object's own name; the path of an inflated shard ends with `.tar`. The
    files are read-only, and other processes of the node may read them, too. They stay cached, even
    across a restart of the daemon, until the block or the process ends. All of them must fit into
    the cache at the same time. One file descriptor is open per file.

    A shard is a file whose name ends with `.tar` or `.tar.gz`, for example. It is inflated, and
    checked to be a whole tar. A url prefix stands for the shards below it, or for all files below
    it if none is a shard.

    Args:
        urls: as for `ShardDataset`, but of any files.
        job: name of this job in `shardcache status`. Default: as for `ShardDataset`.
        socket, daemon: as for `ShardDataset`.
        timeout_s: time limit in seconds for each of two waits: for a file of which nothing
            arrives, and for a lost daemon to come back.

    Raises:
        NoDaemonError, DaemonError, VersionMismatchError: the daemon cannot be used.
        NotFoundError, AccessDeniedError, NotAllowedError, OriginError: `urls` cannot be resolved,
            or a file cannot be fetched.
        ShardError: a shard is damaged, or not a tar.
        CapacityError: the files do not fit into the cache, in addition to those that other jobs
            hold.
        ShardTimeoutError: a file did not arrive in time.
        CacheDirError: this process cannot read the cache folder.
    """
    choice = DaemonChoice.of(socket, daemon)
    reader = ReaderIdentity(job or job_name())
    # The name of each object decides whether it is read as a shard, or as any other file.
    wanted: Wanted = "either"
    manifest = resolve(choice, reader, absolute_urls(urls), timeout_s, wanted)
    with ExitStack() as resources:
        session = resources.enter_context(
            session_of(choice, reader, manifest, wanted, Patience(timeout_s)),
        )
        files = []
        for number in range(len(manifest)):
            file = CachedFile(session, number, named=True)
            files.append(resources.enter_context(closing(file)))
        yield [str(file.wait_whole()) for file in files]


@checked(OTHER_WORDS, url=URL, **_RULES)
def open_cached(
    url: str | os.PathLike[str],
    *,
    job: str | None = None,
    socket: str | os.PathLike[str] | None = None,
    daemon: DaemonName = "auto",
    timeout_s: float = 300.0,
) -> io.BufferedReader:
    """Open any file for reading. Only what is read is fetched, until a local file is needed.

        with open_cached("s3://bucket/model.safetensors") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes))

        with open_cached("s3://bucket/model.pt") as file:
            weights = torch.load(file.name, mmap=True, weights_only=True)

    The file's bytes are the object's own, even if it is a shard. What is fetched depends on what is
    called:

    - `read(n)`, `seek`, iteration: the parts (`--range-part-size`) that have the bytes. A file that
      is read in order is fetched ahead, and once more than half of it is read, it is fetched whole.
    - `read()` from the start, `name`, `fileno()`: the whole file, verified. `name` is its path,
      which other processes may read, too, while the file is open. `mmap` needs `fileno()`, and some
      libraries ask for either, such as `zipfile` and `numpy.load`.

    A file that is cached whole is not fetched, and stays cached until it is closed. Before that,
    its parts may be evicted and fetched again. If the object is replaced while it is open, reading
    on raises OutdatedError or ShardChangedError.

    Arguments and errors are the same as for `cached_paths`. Methods that read raise them, too.
    """
    choice = DaemonChoice.of(socket, daemon)
    reader = ReaderIdentity(job or job_name())
    open_session = partial(session_of, choice, reader, patience=Patience(timeout_s))
    return ObjectReader(open_session, absolute_url(url))
