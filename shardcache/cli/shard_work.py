"""Output of the commands for long work on many shards: progress, failures and a summary.

The daemon does the work, and sends events. `warm`, `pin`, `verify` and `index` pass the events to
`show_work`. An event is a JSON object with the field `event`, such as "progress" or "shard"; the
last event is "done".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from shardcache.cli import common
from shardcache.shared.protocol import Json
from shardcache.shared.units import size

if TYPE_CHECKING:
    from rich.console import Console

    from shardcache.cli.admin_client import Lines


@contextmanager
def byte_progress(console: Console, label: str) -> Iterator[Callable[[Json], None]]:
    """Show a progress bar in bytes and shards, hidden if the output is not a terminal.

    Yields a function that updates the bar by an event's `done_bytes`, `total_bytes`, `done_shards`
    and `shards`.
    """
    from rich import progress

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[shards]}"),
    )
    with progress.Progress(
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bars:
        task = bars.add_task(label, total=None, shards="")

        def update(event: Json) -> None:
            if "done_shards" in event:
                bars.update(task, shards=f"{event['done_shards']:,}/{event['shards']:,} shards")
            bars.update(task, completed=event.get("done_bytes"), total=event.get("total_bytes"))

        yield update


def print_lines(lines: Iterable[Json]) -> int:
    """Print each line of an answer as JSON; return the number of failures among the lines."""
    failed = 0
    for line in lines:
        common.print_json(line)
        # A failure is an event "error", or an event "shard" whose `ok` is false.
        if line.get("event") == "error" or line.get("ok") is False:
            failed += 1
    return failed


def show_work(
    events: Lines,
    label: str,
    summary: str,
    *,
    as_json: bool,
    advice: Callable[[], str] = lambda: "",
    line_per_shard: bool = False,
    stderr: bool = False,
) -> None:
    """Show the progress of the daemon's work on many shards until it is done.

    Exit with code 1 if a shard failed.

    Args:
        events: the events of the work.
        label: label of the progress bar.
        summary: the last line to print, as a format string for the fields of the `done` event, as
            `_with_texts` returns them.
        as_json: True to print each event as JSON instead.
        advice: called if a shard failed; returns a line to print after the summary, "" for no line.
        line_per_shard: True to print a line per shard if there is no terminal for a progress bar.
        stderr: True to print to standard error, if the command prints its result to standard
            output.
    """
    with closing(events):
        if as_json:
            failed = print_lines(events)
        else:
            console = common.make_console(stderr=stderr)
            done, failed = _follow(events, console, label, line_per_shard=line_per_shard)
            console.print(summary.format_map(_with_texts(done)), markup=False)
            hint = advice() if failed else ""
            if hint:
                console.print(hint, markup=False)
    if failed:
        common.fail()


def _follow(
    events: Iterable[Json],
    console: Console,
    label: str,
    *,
    line_per_shard: bool,
) -> tuple[Json, int]:
    """Show the progress, each failure as it occurs, and each remedy once at the end.

    Returns the `done` event of the work, and the number of failures. The arguments are those of
    `show_work`.
    """
    from rich.text import Text

    failures: list[Json] = []

    def show_failure(error: Json, url: str | None = None) -> None:
        failures.append(error)
        where = error.get("url") or url
        text = f"{where}: {error['message']}" if where else error["message"]
        console.print(Text("failed  ", style="red").append(text, style="default"))

    with byte_progress(console, label) as show:
        for event in events:
            match event["event"]:
                case "start" | "resolved" | "progress":
                    show(event)
                case "shard" if event.get("ok") is False:
                    show_failure(event["error"], event["url"])
                case "shard" if line_per_shard and not console.is_terminal:
                    line = f"{event['state']}  {size(event['size_bytes'])}  {event['url']}"
                    console.print(line, markup=False)
                case "retrying":
                    console.print(f"retrying  {event['url']}: {event['message']}", markup=False)
                case "error":
                    show_failure(event["error"])
                case "done":  # always the last event
                    done = event
    for remedy in dict.fromkeys(error["remedy"] for error in failures if error.get("remedy")):
        console.print(f"  What to do: {remedy}", markup=False)
    return done, len(failures)


def _with_texts(event: Json) -> Json:
    """Return an event with its sizes and its counts of shards and samples as texts.

    Other numbers stay numbers. The field `succeeded`, the number of shards that did not fail, is
    added as text.
    """
    succeeded = event.get("shards", 0) - event.get("failed", 0)
    shown: Json = {
        "succeeded": common.quantity(succeeded, "shard"),
        "refused": 0,  # replaced below, unless the daemon is of a release that does not count them
    }
    for name, value in event.items():
        match value:
            case dict():
                shown[name] = _with_texts(value)
            case int() if name.endswith("bytes"):
                shown[name] = size(value)
            case int() if name in ("shards", "samples"):
                shown[name] = common.quantity(value, name.removesuffix("s"))
            case _:
                shown[name] = value
    return shown
