"""`fetch_into`: the work of `shardcache get`, which fetches files through the cache into a folder.

The command asks a daemon to fetch the files into its cache, waits for one file after another, and
puts each into the destination as a link or a copy. A `ShardRef` stands for a file: it has its url,
version and size. The `names` of a file are the folders and the name of its path below the
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
from shardcache.cli.getting.placed_files import Names, is_copy_of, open_folder, place_file
from shardcache.cli.getting.wanted_files import PATIENCE, find_files
from shardcache.shared.exceptions import (
    CacheError,
    ConfigError,
    OriginError,
    ShardcacheError,
    ShardError,
)
from shardcache.shared.private import PrivatePlace
from shardcache.shared.protocol import Json, ShardRef
from shardcache.shared.wording.redact import redact
from shardcache_client.daemon.choice import DaemonChoice
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.files.cached_file import CachedFile, session_of
from shardcache_client.order.shards.manifest import Manifest

_JOB = "shardcache get"  # name of the command's job in the daemon's status


def fetch_into(
    source: str,
    dest: str,
    socket: Path | None,
    *,
    links: bool | None,
    as_json: bool,
) -> None:
    """Fetch files and put them below a folder. Exits with code 1 if some failed.

    Args:
        source: the command's SOURCE: a url, a pattern or an absolute path.
        dest: the command's DEST: the folder or, for a single file, a new name.
        socket: path of the daemon's socket; None for the default socket.
        links: value of the option --link/--copy; None if the option was not given.
        as_json: True to print events as JSON.
    """
    choice = DaemonChoice.of(socket)  # the node's daemon, or a private one
    reader = ReaderIdentity(_JOB)
    folder = Path(dest)
    wanted = find_files(source, choice, reader)
    files = wanted.by_names
    # A single file may get a new name, as with `cp`.
    is_new_name = not folder.is_dir() and not dest.endswith("/")
    if wanted.is_alone and is_new_name:
        [ref] = files.values()
        files = {(folder.name,): ref}
        folder = folder.parent

    with ExitStack() as stack:
        try:
            folder_fd = stack.enter_context(open_folder(folder))
        except OSError as exn:
            raise ConfigError(
                f"cannot use the folder {folder} ({exn.strerror})",
                remedy="choose another DEST",
            ) from exn
        show = common.print_json if as_json else stack.enter_context(progress_display())
        # If the node has no daemon, `find_files` has started a private one.
        daemon = AdminClient(choice.node_socket or PrivatePlace.find().socket)
        progress = GetProgress([*files.values(), *wanted.refused], daemon, show)
        run = _Run(folder, folder_fd, progress, show)
        missing = run.skip_present(files)
        progress.show_event("resolved")
        run.report_refused(wanted.refused)
        on_wait = partial(progress.show_event, "progress")
        for names, ref, file in _open_files(missing, choice, reader, on_wait):
            run.place(names, ref, file, links=links)
        progress.show_event("done", run.counts)
    if run.counts["failed"]:
        common.fail()


class _Run:
    """One run of the command, in which files are put in place one after another.

    Attributes:
        counts: number of files by state. A state is a result of `place_file`, or "failed".
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
            progress: records each file that is in place or has failed.
            show: called with an event for each file.
        """
        self.counts = Counter[str]()
        self._folder = folder
        self._folder_fd = folder_fd
        self._progress = progress
        self._show = show

    def skip_present(self, files: Mapping[Names, ShardRef]) -> dict[Names, ShardRef]:
        """Count the files that have been copied to the destination before; return the others."""
        missing: dict[Names, ShardRef] = {}
        for names, ref in files.items():
            if is_copy_of(self._folder_fd, names, ref):
                self._progress.record_end(ref)
                self.counts["present"] += 1
            else:
                missing[names] = ref
        return missing

    def report_refused(self, refused: Mapping[ShardRef, ConfigError]) -> None:
        """Report the files as failed that cannot have a path below the destination."""
        for ref, reason in refused.items():
            self._show({"event": "error", "error": reason.to_json()})
            self.counts["failed"] += 1
            self._progress.record_end(ref)

    def place(self, names: Names, ref: ShardRef, file: CachedFile, *, links: bool | None) -> None:
        """Wait until a file is cached, put it into the destination, and close it.

        An error of a single file is reported and counted; the run goes on.
        """
        path = self._folder.joinpath(*names)
        on_copied = partial(self._progress.record_copied, ref)
        try:
            with closing(file):
                cached = file.wait_whole()
                state = place_file(cached, self._folder_fd, names, ref, on_copied, links=links)
        except (OriginError, ShardError, CacheError, OSError) as exn:
            state = "failed"
            error = _reported_error(exn, path, ref)
            self._show({"event": "error", "error": error.to_json()})
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
        self._progress.record_end(ref)


def _reported_error(exn: ShardcacheError | OSError, path: Path, ref: ShardRef) -> ShardcacheError:
    """Return the error to report for one file.

    Raises ShardcacheError, which ends the run, if the destination has no space left, since no other
    file would fit either.
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
    """Yield each file with its names, in order; the daemon fetches all of them meanwhile.

    The caller has to wait for each file, and to close it.

    Args:
        files: the files by their names.
        choice: which daemon to use, the node's or a private one.
        reader: identity of this command towards the daemon.
        on_wait: called each second while the caller waits for a file.
    """
    if not files:
        return
    manifest = Manifest.of(files.values())
    with session_of(choice, reader, manifest, wanted="files", patience=PATIENCE) as session:
        session.on_wait = on_wait
        for number, (names, ref) in enumerate(files.items()):
            yield names, ref, CachedFile(session, number)
