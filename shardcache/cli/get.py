"""The work of `shardcache get`: files from the cache in a folder, as hard links where that is safe, else as copies."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit

from shardcache.access import WEB, checked, protocol_of
from shardcache.cli import common
from shardcache.cli.admin_client import AdminClient
from shardcache.errors import CacheError, ConfigError, NotFoundError, OriginError, ShardcacheError, ShardError
from shardcache.private import PrivatePlace
from shardcache.protocol import Json, ShardRef, local_path
from shardcache.redact import printable, redact
from shardcache.units import size
from shardcache_client.daemon.choice import DaemonChoice, Patience
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.session import resolve
from shardcache_client.order.manifest import Manifest
from shardcache_client.paths import CachedFile, session_of

Names: TypeAlias = tuple[str, ...]  # of the folders and the file, below the destination
Copied: TypeAlias = Callable[[int], None]  # told of the bytes of a file that have been copied

_JOB = "shardcache get"
# A file may take hours. A daemon that stops drains for at most 20 s, and the next one starts in seconds.
_PATIENCE = Patience(limit_s=7 * 86_400.0, away_s=30.0)
_PATTERN = re.compile(r"[*?\[{]")
_FICLONE = 0x40049409  # ioctl_ficlone(2)
_MARK = "user.shardcache"  # extended attribute of a copy: what it is of, and its size and time
_STEP_BYTES = 64 * 2**20  # copied between two looks at the clock
_LINE_S, _EVENT_S = 30.0, 1.0  # between lines of progress in a log, and between events while a file is copied
_FIELDS = ("url", "done_bytes", "total_bytes", "rate_bytes_per_s", "stage")  # of a file that arrives or is copied
_STATES = ("linked", "cloned", "copied", "present", "failed")


def fetch_into(source: str, dest: str, socket: Path | None, *, links: bool | None, as_json: bool) -> None:
    """Fetch files and put them below a folder; exit 1 if some failed. `links` as the option, None without it."""
    choice = DaemonChoice.of(socket)
    reader = ReaderIdentity(_JOB)
    folder = Path(dest)
    found = _found(source, choice, reader)
    wanted = found.named
    if found.is_alone and not folder.is_dir() and not dest.endswith("/"):
        (ref,) = wanted.values()
        wanted = {(folder.name,): ref}
        folder = folder.parent
    counts = Counter[str]()
    with ExitStack() as stack:
        try:
            place = stack.enter_context(_folder_of(folder))
        except OSError as exn:
            raise ConfigError(f"cannot use the folder {folder} ({exn.strerror})", remedy="choose another DEST") from exn
        show = common.print_json if as_json else stack.enter_context(_shown())
        # `_found` has started a private daemon if there is no other.
        daemon = AdminClient(choice.node or PrivatePlace.find().socket)
        progress = Progress([*wanted.values(), *found.refused], daemon, show)
        todo = {names: ref for names, ref in wanted.items() if not _is_copy_of(place, names, ref)}
        for names in wanted.keys() - todo.keys():
            progress.ended(wanted[names])
            counts["present"] += 1
        progress.tell("resolved")
        for ref, refusal in found.refused.items():
            show({"event": "error", "error": refusal.to_json()})
            counts["failed"] += 1
            progress.ended(ref)
        for names, ref, file in _held(todo, choice, reader, lambda: progress.tell("progress")):
            path = folder.joinpath(*names)
            try:
                with closing(file):
                    state = _put(file.whole(), place, names, ref, partial(progress.copied, ref), links=links)
            except (OriginError, ShardError, CacheError, OSError) as exn:
                state = "failed"
                show({"event": "error", "error": _failure(exn, path, ref).to_json()})
            else:
                named = {"event": "file", "url": redact(ref.url), "path": str(path)}
                show({**named, "state": state, "size_bytes": ref.size_bytes})
            counts[state] += 1
            progress.ended(ref)
        progress.tell("done", counts)
    if counts["failed"]:
        common.fail()


def _failure(exn: ShardcacheError | OSError, path: Path, ref: ShardRef) -> ShardcacheError:
    """Return the error of one file. Raises ShardcacheError where there is no space for any other file either."""
    if getattr(exn, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        raise ShardcacheError(
            f"no space is left for {path}",
            url=ref.url,
            remedy="free space there, and run the same command again: it keeps the files that are there",
        ) from exn
    if isinstance(exn, ShardcacheError):
        return exn
    return ShardcacheError(f"cannot write {path} ({exn.strerror})", url=ref.url)


def _held(
    todo: Mapping[Names, ShardRef], choice: DaemonChoice, reader: ReaderIdentity, on_wait: Callable[[], None]
) -> Iterator[tuple[Names, ShardRef, CachedFile]]:
    """Yield each file, to be waited for and closed by the caller; those after it are fetched meanwhile."""
    if not todo:
        return
    with session_of(choice, reader, Manifest.of(todo.values()), "files", _PATIENCE) as session:
        session.on_wait = on_wait
        for number, (names, ref) in enumerate(todo.items()):
            yield names, ref, CachedFile(session, number)


@dataclass(frozen=True, slots=True)
class _Found:
    """The files of a source: by their names below the destination, and those that can have none there."""

    named: dict[Names, ShardRef]
    refused: dict[ShardRef, ConfigError]
    is_alone: bool  # True for a single file's url


def _found(source: str, choice: DaemonChoice, reader: ReaderIdentity) -> _Found:
    """Return the files of a source. Raises ConfigError if two would have the same name."""
    refs = list(resolve(choice, reader, [source], _PATIENCE.limit_s, "files"))
    is_missing = [ref.url for ref in refs] == [source] and refs[0].version is None
    if is_missing and protocol_of(source) not in WEB:  # web servers have no folders
        with suppress(NotFoundError):  # not an object: a folder, or a repository on the Hub
            source, refs = f"{source}/", list(resolve(choice, reader, [f"{source}/"], _PATIENCE.limit_s, "files"))
    base = source[: source.rfind("/", 0, found.start() if (found := _PATTERN.search(source)) else None) + 1]
    if protocol_of(source) in WEB:
        base = source[: source.partition("?")[0].rfind("/") + 1]
    named: dict[Names, ShardRef] = {}
    refused: dict[ShardRef, ConfigError] = {}
    for ref in refs:
        try:
            names = _names(checked(ref.url), base)
        except ConfigError as exn:
            refused[ref] = exn
            continue
        if named.setdefault(names, ref) != ref:
            raise ConfigError(f"two files would be {'/'.join(names)}: this, and {named[names].url}", url=ref.url)
    is_alone = not source.endswith("/") and _PATTERN.search(source) is None and len(refs) == len(named) == 1
    return _Found(named, refused, is_alone)


def _names(url: str, base: str) -> Names:
    """Return the folders and name of a file below the destination. Raises ConfigError for a name that leads outside."""
    path, root = (local_path(text) or text for text in (url, base))
    path = urlsplit(path)._replace(query="", fragment="").geturl() if protocol_of(url) in WEB else path
    names = tuple((path.removeprefix(root) if path.startswith(root) else path.rpartition("/")[2]).split("/"))
    if any(name in ("", ".", "..") or "\0" in name for name in names):
        remedy = "copy it to another key, or fetch it by open_cached, which needs no name for it"
        raise ConfigError("the key is not a path below a folder", url=url, remedy=remedy)
    return names


# Files in the destination: nothing outside of it, whatever links lie in it


@contextmanager
def _folder_of(place: Path | int, names: Names = (), *, make: bool = True) -> Iterator[int]:
    """Provide the destination, or an open folder's folder by its names; no link is followed.

    It is created if it is missing; without `make`, that is a FileNotFoundError.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    if isinstance(place, Path):
        place.mkdir(parents=True, exist_ok=True)
    fd = os.open(place, flags) if isinstance(place, Path) else os.dup(place)
    try:
        for name in names:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=fd)
            inner = os.open(name, flags | os.O_NOFOLLOW, dir_fd=fd)
            os.close(fd)
            fd = inner
        yield fd
    finally:
        os.close(fd)


def _is_copy_of(folder: int, names: Names, ref: ShardRef) -> bool:
    """Return True if an earlier run has put a copy of the same version there, and nobody has changed it since."""
    if ref.version is None:
        return False
    with suppress(OSError), _folder_of(folder, names[:-1], make=False) as parent:
        fd = os.open(names[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
        try:
            return os.getxattr(fd, _MARK) == _mark(fd, ref)
        finally:
            os.close(fd)
    return False


def _mark(fd: int, ref: ShardRef) -> bytes:
    stat, name = os.fstat(fd), hashlib.sha256(f"{ref.url}\0{ref.version}".encode()).hexdigest()
    return f"{name} {stat.st_size} {stat.st_mtime_ns}".encode()


def _put(cached: Path, folder: int, names: Names, ref: ShardRef, copied: Copied, *, links: bool | None) -> str:
    """Have a cached file under a name in the destination, at once and whole; return how. Raises OSError."""
    with _folder_of(folder, names[:-1]) as parent, cached.open("rb", buffering=0) as file:
        with suppress(FileNotFoundError):
            there = os.stat(names[-1], dir_fd=parent, follow_symlinks=False)
            if links is not False and os.path.samestat(there, os.fstat(file.fileno())):
                return "present"
        if links or (links is None and not os.access(cached, os.W_OK, effective_ids=True)):
            with suppress(OSError), _replaced(names[-1], parent) as temporary:
                os.link(cached, temporary, dst_dir_fd=parent)  # fails on another filesystem, or for another user's file
                return "linked"
        with _replaced(names[-1], parent) as temporary:
            return _copy(file.fileno(), temporary, parent, ref, copied)


@contextmanager
def _replaced(name: str, parent: int) -> Iterator[str]:
    """Provide the name under which to make a file that takes the place of another at the end of the block."""
    temporary = f".{secrets.token_hex(8)}.part"
    try:
        yield temporary
        os.replace(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
    finally:
        with suppress(FileNotFoundError):  # it is still there if both were names of one file
            os.unlink(temporary, dir_fd=parent)


def _copy(source: int, name: str, parent: int, ref: ShardRef, copied: Copied) -> str:
    flags = os.O_WRONLY | os.O_CLOEXEC
    try:  # a file without a name leaves nothing behind, but not all filesystems have them
        fd, is_named = os.open(".", os.O_TMPFILE | flags, 0o644, dir_fd=parent), False
    except OSError:
        fd, is_named = os.open(name, os.O_CREAT | os.O_EXCL | flags, 0o644, dir_fd=parent), True
    try:
        state = _fill(fd, source, copied)
        with suppress(OSError):  # without the mark, it is copied again by the next run
            os.setxattr(fd, _MARK, _mark(fd, ref))
        if not is_named:
            os.link(f"/proc/self/fd/{fd}", name, dst_dir_fd=parent, follow_symlinks=True)
    finally:
        os.close(fd)
    return state


def _fill(fd: int, source: int, copied: Copied) -> str:
    try:
        fcntl.ioctl(fd, _FICLONE, source)
    except OSError:
        copied(offset := 0)
        while sent := os.sendfile(fd, source, offset, _STEP_BYTES):
            copied(offset := offset + sent)
        return "copied"
    return "cloned"


# Progress


class Progress:
    """The files of one run: bytes that are in the cache or in place, and the files still on their way to either."""

    def __init__(self, refs: Iterable[ShardRef], daemon: AdminClient, show: Callable[[Json], None]) -> None:
        self._left = {redact(ref.url): ref.size_bytes or 0 for ref in refs}
        self._files, self._total_bytes, self._ended_bytes = len(self._left), sum(self._left.values()), 0
        self._done: dict[str, int] = {}  # bytes of each file that is left
        self._copying: list[Json] = []  # the file that is being copied
        self._daemon, self._show = daemon, show
        self._begun: tuple[float, int] | None = None
        self._told_s = 0.0

    def ended(self, ref: ShardRef) -> None:
        """Note that a file is there, or has failed."""
        self._ended_bytes += self._left.pop(url := redact(ref.url), 0)
        self._done.pop(url, None)
        self._copying = []

    def copied(self, ref: ShardRef, done_bytes: int) -> None:
        """Note how much of a file has been copied."""
        self._copying = [dict(zip(_FIELDS, (redact(ref.url), done_bytes, ref.size_bytes, 0, "copying"), strict=True))]
        if time.monotonic() - self._told_s > _EVENT_S:
            self.tell("progress")

    def tell(self, kind: str, more: Mapping[str, int] | None = None) -> None:
        """Show an event with the state of the whole, and of the files that arrive or are being copied."""
        arriving = self._copying
        with suppress(ShardcacheError):  # the daemon is restarting: the session waits for it
            rows = self._daemon.status()["transfers"]
            arriving = [*arriving, *(row for row in rows if row["url"] in self._left)]
        for row in arriving:  # a file that has arrived is not among the transfers any more
            self._done[row["url"]] = max(row["done_bytes"], self._done.get(row["url"], 0))
        done_bytes, now_s = self._ended_bytes + sum(self._done.values()), time.monotonic()
        self._begun, self._told_s = self._begun or (now_s, done_bytes), now_s
        rate = (done_bytes - self._begun[1]) / max(now_s - self._begun[0], 1e-3)
        event = {
            "event": kind,
            "done_files": self._files - len(self._left),
            "files": self._files,
            "done_bytes": done_bytes,
            "total_bytes": self._total_bytes,
            "rate_bytes_per_s": round(rate),
            "left_s": round((self._total_bytes - done_bytes) / rate) if rate > 0 else None,
            "arriving": [{name: row[name] for name in _FIELDS} for row in arriving],
        }
        self._show({**event, **(more or {})})


@contextmanager
def _shown() -> Iterator[Callable[[Json], None]]:
    """Show events: bars on a terminal, one in total and one per arriving file; elsewhere lines."""
    from rich import progress

    console = common.make_console()
    numbers = (progress.DownloadColumn(), progress.TransferSpeedColumn(), progress.TimeRemainingColumn())
    columns = (progress.TextColumn("{task.description}", markup=False), progress.BarColumn(), *numbers)
    line, line_s = partial(console.print, markup=False), time.monotonic()
    with progress.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        total, tasks = bars.add_task("total", total=None), dict[str, progress.TaskID]()

        def advance(event: Json) -> None:
            nonlocal line_s
            described, extent = f"{event['done_files']:,}/{event['files']:,} files", ("done_bytes", "total_bytes")
            done_bytes, total_bytes = map(event.get, extent)
            bars.update(total, description=described, completed=done_bytes, total=total_bytes)
            arriving = {row["url"]: [*map(row.get, (*extent, "stage"))] for row in event["arriving"]}
            for url in tasks.keys() - arriving.keys():
                bars.remove_task(tasks.pop(url))
            for url, (completed, whole, stage) in arriving.items():
                tasks[url] = tasks[url] if url in tasks else bars.add_task("", total=whole)
                named = f"{'copying ' * (stage == 'copying')}{printable(url).rpartition('/')[2]}"
                bars.update(tasks[url], description=named, completed=completed, total=whole)
            if not console.is_terminal and time.monotonic() - line_s > _LINE_S:
                line_s, left = time.monotonic(), f", {event['left_s']:,} s left" if event["left_s"] else ""
                numbers = map(size, (done_bytes, total_bytes, event["rate_bytes_per_s"]))
                line("{}, {} of {}, {}/s{}".format(described, *numbers, left))

        def show(event: Json) -> None:
            match event["event"]:
                case "file":
                    line(f"{event['state']:8}{size(event['size_bytes'] or 0):>10}  {event['path']}")
                case "error":
                    text = "failed  {url}: {message}" + ("\n  What to do: {remedy}" if event["error"]["remedy"] else "")
                    line(text.format_map(event["error"]))
                case "done":
                    states = ", ".join(f"{event[name]:,} {name}" for name in _STATES if event.get(name))
                    line(f"{common.count(event['files'], 'file')}: {states or 'none'}")
                case _:
                    advance(event)

        yield show
