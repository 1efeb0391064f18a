"""`fetch_into`: files through the cache, as links where that is safe, else as copies."""

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
        source: the argument of the command, with absolute paths.
        dest: the argument of the command.
        socket: the daemon's, if one is named.
        links: value of the option --link/--copy; None without it.
        as_json: True to print events as JSON.
    """
    choice = DaemonChoice.of(socket)
    reader = ReaderIdentity(_JOB)
    folder = Path(dest)
    files = find_files(source, choice, reader)
    targets = files.by_names
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
        # `find_files` has started a private daemon if there is no other.
        daemon = AdminClient(choice.node or PrivatePlace.find().socket)
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
        counts: number of files by state: that of `placed_files.put`, or "failed".
    """

    def __init__(
        self,
        folder: Path,
        folder_fd: int,
        progress: GetProgress,
        show: Callable[[Json], None],
    ) -> None:
        """Put files below `folder`, of which `folder_fd` is a descriptor."""
        self.counts = Counter[str]()
        self._folder = folder
        self._folder_fd = folder_fd
        self._progress = progress
        self._show = show

    def without_present(self, targets: Mapping[Names, ShardRef]) -> dict[Names, ShardRef]:
        """Return the files that are not in the folder yet; count the others."""
        missing: dict[Names, ShardRef] = {}
        for names, ref in targets.items():
            if is_copy_of(self._folder_fd, names, ref):
                self._progress.end(ref)
                self.counts["present"] += 1
            else:
                missing[names] = ref
        return missing

    def refuse(self, refused: Mapping[ShardRef, ConfigError]) -> None:
        """Report the files whose names are not possible in the folder."""
        for ref, refusal in refused.items():
            self._show({"event": "error", "error": refusal.to_json()})
            self.counts["failed"] += 1
            self._progress.end(ref)

    def put(self, names: Names, ref: ShardRef, file: CachedFile, *, links: bool | None) -> None:
        """Wait for a file and put it in place; close it."""
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
    """Return the error of one file.

    Raises ShardcacheError where there is no space for any other file either.
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
    """Yield each file, while the daemon fetches others; the caller waits for it and closes it."""
    if not files:
        return
    manifest = Manifest.of(files.values())
    with session_of(choice, reader, manifest, "files", PATIENCE) as session:
        session.on_wait = on_wait
        for number, (names, ref) in enumerate(files.items()):
            yield names, ref, CachedFile(session, number)
