"""Progress of one run of `get`: its events, and bars or lines that show them.

Each file first arrives in the cache, and is then linked or copied into the destination. A file is
pending until it is in place there, or has failed. `fetch_into` reports to a `GetProgress`, which
makes events. An event is a JSON object; --json prints it, otherwise a bar or a line shows it. A
`ShardRef` stands for a file: it has its url, version and size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from shardcache.cli import common
from shardcache.cli.admin_client import AdminClient
from shardcache.shared.exceptions import ShardcacheError
from shardcache.shared.protocol import Json, ShardRef
from shardcache.shared.units import size
from shardcache.shared.wording.redact import printable, redact

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

# Interval between lines of progress if the output is not a terminal.
_LINE_INTERVAL_S = 30.0
# Minimum interval between events while a file is copied.
_EVENT_INTERVAL_S = 1.0
# Fields of an event for each file that arrives or is copied.
_FILE_FIELDS = ("url", "done_bytes", "total_bytes", "rate_bytes_per_s", "stage")
_MIN_ELAPSED_S = 1e-3  # divisor of a rate at the first event, when no time has passed
# States of files that are not pending. The last event has the number of files in each, if any.
_FINAL_STATES = ("linked", "cloned", "copied", "present", "failed")


class GetProgress:
    """The files of one run: the bytes that are in the cache or in place, and the pending files."""

    def __init__(
        self,
        refs: Iterable[ShardRef],
        daemon: AdminClient,
        show: Callable[[Json], None],
    ) -> None:
        """Begin with all files pending.

        Args:
            refs: the files.
            daemon: the daemon that fetches them, whose status has the number of arrived bytes.
            show: called with each event.
        """
        # Size of each pending file, by its url as the daemon's status shows it.
        self._pending_bytes = {redact(ref.url): ref.size_bytes or 0 for ref in refs}
        self._files = len(self._pending_bytes)
        self._total_bytes = sum(self._pending_bytes.values())
        self._ended_bytes = 0  # size of the files that are not pending any more
        self._done_bytes: dict[str, int] = {}  # arrived or copied bytes of each pending file
        self._copying: Json | None = None  # the file that is being copied, as in an event
        self._daemon = daemon
        self._show = show
        # The time of the first event, and the number of bytes that were done then.
        self._start: tuple[float, int] | None = None
        self._shown_s = 0.0  # time of the last event

    def record_end(self, ref: ShardRef) -> None:
        """Record that a file is in place, or has failed."""
        url = redact(ref.url)
        self._ended_bytes += self._pending_bytes.pop(url, 0)
        self._done_bytes.pop(url, None)
        self._copying = None

    def record_copied(self, ref: ShardRef, done_bytes: int) -> None:
        """Record the bytes of a file that have been copied; show an event every second or so."""
        self._copying = {
            "url": redact(ref.url),
            "done_bytes": done_bytes,
            "total_bytes": ref.size_bytes,
            "rate_bytes_per_s": 0,
            "stage": "copying",
        }
        if time.monotonic() - self._shown_s > _EVENT_INTERVAL_S:
            self.show_event("progress")

    def show_event(self, kind: str, counts: Mapping[str, int] | None = None) -> None:
        """Show an event with the totals, and with each file that arrives or is copied.

        Args:
            kind: kind of the event: "resolved", "progress" or "done".
            counts: number of files by state, as further fields of the event; None for no others.
        """
        arriving = self._arriving_files()
        # A file that has arrived is not among the transfers any more, but its bytes still count
        # until it is in place. So the largest number so far is remembered for each pending file.
        for file in arriving:
            url = file["url"]
            self._done_bytes[url] = max(file["done_bytes"], self._done_bytes.get(url, 0))
        done_bytes = self._ended_bytes + sum(self._done_bytes.values())

        now_s = time.monotonic()
        self._shown_s = now_s
        if self._start is None:
            self._start = now_s, done_bytes
        start_s, start_bytes = self._start
        rate_bytes_per_s = (done_bytes - start_bytes) / max(now_s - start_s, _MIN_ELAPSED_S)
        left_s = None
        if rate_bytes_per_s > 0:
            left_s = round((self._total_bytes - done_bytes) / rate_bytes_per_s)
        event = {
            "event": kind,
            "done_files": self._files - len(self._pending_bytes),
            "files": self._files,
            "done_bytes": done_bytes,
            "total_bytes": self._total_bytes,
            "rate_bytes_per_s": round(rate_bytes_per_s),
            "left_s": left_s,
            "arriving": arriving,
        }
        self._show({**event, **(counts or {})})

    def _arriving_files(self) -> list[Json]:
        """Return the pending files that are being copied or fetched, with their `_FILE_FIELDS`."""
        files = [] if self._copying is None else [self._copying]
        # The files that are being fetched are left out while the daemon is restarting.
        with suppress(ShardcacheError):
            transfers = self._daemon.status()["transfers"]
            files += [
                {name: transfer[name] for name in _FILE_FIELDS}
                for transfer in transfers
                if transfer["url"] in self._pending_bytes
            ]
        return files


@contextmanager
def progress_display() -> Iterator[Callable[[Json], None]]:
    """Yield a function that shows an event.

    A terminal shows bars, one for the total and one for each arriving file; other outputs get
    lines.
    """
    from rich import progress

    console = common.make_console()
    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bars:
        yield _Display(console, bars).show


class _Display:
    """Bars or lines that show a run's events."""

    def __init__(self, console: Console, bars: Bars) -> None:
        self._console = console
        self._bars = bars
        self._total = bars.add_task("total", total=None)
        self._tasks: dict[str, TaskID] = {}  # the bars of arriving files, by url
        self._last_line_s = time.monotonic()  # time of the last line of progress

    def show(self, event: Json) -> None:
        """Show an event."""
        match event["event"]:
            case "file":
                file_size = size(event["size_bytes"] or 0)
                self._print(f"{event['state']:8}{file_size:>10}  {event['path']}")
            case "error":
                error = event["error"]
                text = f"failed  {error['url']}: {error['message']}"
                if error["remedy"]:
                    text += f"\n  What to do: {error['remedy']}"
                self._print(text)
            case "done":
                counts = [f"{event[name]:,} {name}" for name in _FINAL_STATES if event.get(name)]
                files = common.quantity(event["files"], "file")
                self._print(f"{files}: {', '.join(counts) or 'none'}")
            case "resolved" | "progress":
                self._advance(event)

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False)

    def _advance(self, event: Json) -> None:
        """Update the bars; without a terminal, print a line every `_LINE_INTERVAL_S`."""
        files = f"{event['done_files']:,}/{event['files']:,} files"
        self._bars.update(
            self._total,
            description=files,
            completed=event["done_bytes"],
            total=event["total_bytes"],
        )
        self._show_arriving(event["arriving"])
        now_s = time.monotonic()
        if self._console.is_terminal or now_s - self._last_line_s <= _LINE_INTERVAL_S:
            return

        self._last_line_s = now_s
        done = f"{size(event['done_bytes'])} of {size(event['total_bytes'])}"
        line = f"{files}, {done}, {size(event['rate_bytes_per_s'])}/s"
        if event["left_s"]:
            line += f", {event['left_s']:,} s left"
        self._print(line)

    def _show_arriving(self, files: list[Json]) -> None:
        """Show one bar for each file that arrives or is copied, and remove the other bars."""
        arriving = {file["url"]: file for file in files}
        for url in self._tasks.keys() - arriving.keys():
            self._bars.remove_task(self._tasks.pop(url))
        for url, file in arriving.items():
            if url not in self._tasks:
                self._tasks[url] = self._bars.add_task("", total=None)
            _, _, name = printable(url).rpartition("/")
            if file["stage"] == "copying":
                name = f"copying {name}"
            self._bars.update(
                self._tasks[url],
                description=name,
                completed=file["done_bytes"],
                total=file["total_bytes"],
            )
