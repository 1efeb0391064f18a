"""`fetch_into`: the work of `shardcache get`, files through the cache into a folder.

The command asks a daemon to fetch the files into its cache, waits for one file after another, and
puts each into the destination as a link or a copy. A target is a file with its names below the
destination.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

from shardcache.cli import common
from shardcache.cli.admin_client import AdminClient
from shardcache.cli.getting.get_progress import GetProgress, progress_display
from shardcache.cli.getting.placed_files import Names, folder_of, is_copy_of, put
from shardcache.cli.getting.wanted_files import PATIENCE, find_files
from shardcache.errors import CacheError, ConfigError, OriginError, ShardcacheError, ShardError
from shardcache.redact import redact
from shardcache.shared.private import PrivatePlace
from shardcache.shared.protocol import Json, ShardRef
from shardcache_client.daemon.choice import DaemonChoice
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.files.cached_file import CachedFile, session_of
from shardcache_client.order.shards.manifest import Manifest

_JOB = "shardcache get"


def fetch_into(
    source: str,
    dest: str,
    socket: Path | None,
    *,
    links: bool | None,
    as_json: bool,
) -> None:
    """Fetch files and put them below a folder; exit 1 if some failed.

    Args:
        source: argument of the command: a url, a pattern or an absolute path.
        dest: argument of the command: the folder or, for a single file, a new name.
        socket: path of the daemon's socket; None for the default socket.
        links: value of the option --link/--copy; None if the option was not given.
        as_json: True to print events as JSON.
    """
    choice = DaemonChoice.of(socket)
    reader = ReaderIdentity(_JOB)
    folder = Path(dest)
    files = find_files(source, choice, reader)
    targets = files.by_names
    # A single file may get a new name, as with `cp`.
    is_new_name = not folder.is_dir() and not dest.endswith("/")
    if files.is_alone and is_new_name:
        (ref,) = targets.values()
        targets = {(folder.name,): ref}
        folder = folder.parent
    with ExitStack() as stack:
        try:
            folder_fd = stack.enter_context(folder_of(folder))
        except OSError as exn:
            raise ConfigError(
                f"cannot use the folder {folder} ({exn.strerror})",
                remedy="choose another DEST",
            ) from exn
        show = common.print_json if as_json else stack.enter_context(progress_display())
        # If the node has no daemon, `find_files` has started a private one.
        daemon = AdminClient(choice.node_socket or PrivatePlace.find().socket)
        progress = GetProgress([*targets.values(), *files.refused], daemon, show)
        run = _Run(folder, folder_fd, progress, show)
        missing = run.without_present(targets)
        progress.show_event("resolved")
        run.refuse(files.refused)
        show_progress = partial(progress.show_event, "progress")
        for names, ref, file in _open_files(missing, choice, reader, show_progress):
            run.put(names, ref, file, links=links)
        progress.show_event("done", run.counts)
    if run.counts["failed"]:
        common.fail()


class _Run:
    """The files of one run, put in place one after another.

    Attributes:
        counts: number of files by state. A state is a result of `placed_files.put`, or "failed".
    """

    def __init__(
        self,
        folder: Path,
        folder_fd: int,
        progress: GetProgress,
        show: Callable[[Json], None],
    ) -> None:
        """Begin a run.

        Args:
            folder: path of the destination, for messages.
            folder_fd: descriptor of the destination.
            progress: told of each file that is in place or has failed.
            show: called with the event of each file.
        """
        self.counts = Counter[str]()
        self._folder = folder
        self._folder_fd = folder_fd
        self._progress = progress
        self._show = show

    def without_present(self, targets: Mapping[Names, ShardRef]) -> dict[Names, ShardRef]:
        """Return the files that are not in the destination yet; count the others as present."""
        missing: dict[Names, ShardRef] = {}
        for names, ref in targets.items():
            if is_copy_of(self._folder_fd, names, ref):
                self._progress.end(ref)
                self.counts["present"] += 1
            else:
                missing[names] = ref
        return missing

    def refuse(self, refused: Mapping[ShardRef, ConfigError]) -> None:
        """Report as failed the files whose names are not possible in the destination."""
        for ref, refusal in refused.items():
            self._show({"event": "error", "error": refusal.to_json()})
            self.counts["failed"] += 1
            self._progress.end(ref)

    def put(self, names: Names, ref: ShardRef, file: CachedFile, *, links: bool | None) -> None:
        """Wait until a file is cached, put it into the destination, and close it.

        An error of a single file is reported and counted; the run goes on.
        """
        path = self._folder.joinpath(*names)
        on_copied = partial(self._progress.record_copied, ref)
        try:
            with closing(file):
                cached = file.wait_whole()
                state = put(cached, self._folder_fd, names, ref, on_copied, links=links)
        except (OriginError, ShardError, CacheError, OSError) as exn:
            state = "failed"
            self._show({"event": "error", "error": _failure(exn, path, ref).to_json()})
        else:
            self._show(
                {
                    "event": "file",
                    "url": redact(ref.url),
                    "path": str(path),
                    "state": state,
                    "size_bytes": ref.size_bytes,
                },
            )
        self.counts[state] += 1
        self._progress.end(ref)


def _failure(exn: ShardcacheError | OSError, path: Path, ref: ShardRef) -> ShardcacheError:
    """Return the error of one file, to be reported.

    Raises ShardcacheError, which ends the run, if the destination has no space for any file.
    """
    if getattr(exn, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        raise ShardcacheError(
            f"no space left for {path}",
            url=ref.url,
            remedy="free some space there, then run the same command again: files that are "
            "already there are kept",
        ) from exn
    if isinstance(exn, ShardcacheError):
        return exn
    return ShardcacheError(f"cannot write {path} ({exn.strerror})", url=ref.url)


def _open_files(
    files: Mapping[Names, ShardRef],
    choice: DaemonChoice,
    reader: ReaderIdentity,
    on_wait: Callable[[], None],
) -> Iterator[tuple[Names, ShardRef, CachedFile]]:
    """Yield names, reference and open file of each target, in order.

    The daemon fetches all files in the meantime. The caller waits for each file and closes it.

    Args:
        files: the targets.
        choice: the choice of a daemon.
        reader: identity of this command towards the daemon.
        on_wait: called each second while a file is waited for.
    """
    if not files:
        return
    manifest = Manifest.of(files.values())
    with session_of(choice, reader, manifest, wanted="files", patience=PATIENCE) as session:
        session.on_wait = on_wait
        for number, (names, ref) in enumerate(files.items()):
            yield names, ref, CachedFile(session, number)
