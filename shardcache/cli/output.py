"""Output formatting: rich on a terminal; elsewhere plain text, never wrapped or cut."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from shardcache.units import size

Json = dict[str, Any]

# Wider than any url: a pipe has no edge to wrap at.
_PIPE_COLUMNS = 10_000


def make_console(*, stderr: bool = False) -> Console:
    """Return a console for a terminal, or for a pipe or file."""
    console = Console(stderr=stderr, highlight=False)
    if console.is_terminal:
        return console
    return Console(stderr=stderr, highlight=False, width=_PIPE_COLUMNS, color_system=None)


def make_table(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """Return a table without borders: unobtrusive on a terminal, easy to `cut` in a pipe."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        right = column in numbers
        table.add_column(
            one_line(column), justify="right" if right else "left", no_wrap=right, overflow="fold", header_style="dim"
        )
    return table


def count(number: int, noun: str) -> str:
    """Return `1 shard`, `2,000 shards`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def one_line(text: str, style: str = "") -> Text:
    """Return plain text (never markup) that a narrow column truncates at the end."""
    return Text(text, style, no_wrap=True, overflow="ellipsis")


class Tail:
    """A line that a narrow column truncates at the start: urls differ at the end."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        hidden = len(self._text) - options.max_width
        yield one_line(f"…{self._text[hidden + 1 :]}" if hidden > 0 else self._text)

    def __rich_measure__(self, _console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, len(self._text)).with_maximum(options.max_width)


class ByteProgress:
    """A progress bar in bytes and shards, hidden if the output is not a terminal. A context manager."""

    def __init__(self, console: Console, label: str) -> None:
        self.console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[shards]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: TaskID = self._progress.add_task(label, total=None, shards="")

    def __enter__(self) -> "ByteProgress":
        self._progress.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._progress.stop()

    def update(self, event: Json) -> None:
        """Show the event's `done_bytes`, `total_bytes`, `done_shards` and `shards`."""
        if "done_shards" in event:
            self._progress.update(self._task, shards=f"{event['done_shards']:,}/{event['shards']:,} shards")
        self._progress.update(self._task, completed=event.get("done_bytes"), total=event.get("total_bytes"))


def follow(events: Iterable[Json], console: Console, label: str, *, each_shard: bool = False) -> tuple[Json, int]:
    """Show the progress of long work over shards, each failure as it occurs, and each distinct remedy once at the end.

    Returns the work's `done` event and the number of failures.

    Args:
        each_shard: True to print a line per shard if there is no terminal for a progress bar.
    """
    failures: list[Json] = []

    def fail(error: Json, url: str | None = None) -> None:
        failures.append(error)
        where = error.get("url") or url
        text = f"{where}: {error['message']}" if where else error["message"]
        console.print(Text("failed  ", style="red").append(text, style="default"))

    with ByteProgress(console, label) as bar:
        for event in events:
            match event["event"]:
                case "start" | "resolved" | "progress":
                    bar.update(event)
                case "shard" if event.get("ok") is False:
                    fail(event["error"], event["url"])
                case "shard" if each_shard and not console.is_terminal:
                    line = f"{event['state']}  {size(event['size_bytes'])}  {event['url']}"
                    console.print(line, markup=False)
                case "retrying":
                    console.print(f"retrying  {event['url']}: {event['message']}", markup=False)
                case "error":
                    fail(event["error"])
                case "done":
                    done = event
    for remedy in dict.fromkeys(error["remedy"] for error in failures if error.get("remedy")):
        console.print(f"  What to do: {remedy}", markup=False)
    return done, len(failures)


def readable(event: Json) -> Json:
    """Return an event with sizes and numbers of things as people read them; `intact` are shards that did not fail."""
    shown: Json = {"intact": count(event.get("shards", 0) - event.get("failed", 0), "shard")}
    for name, value in event.items():
        match value:
            case dict():
                shown[name] = readable(value)
            case int() if name.endswith("bytes"):
                shown[name] = size(value)
            case int() if name in ("shards", "samples"):
                shown[name] = count(value, name.removesuffix("s"))
            case _:
                shown[name] = value
    return shown
