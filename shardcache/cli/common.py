"""Options, exit codes, and output: rich on a terminal, elsewhere plain and never wrapped or cut."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click
from click.shell_completion import CompletionItem

from shardcache.errors import ConfigError, NoDaemonError, ShardcacheError
from shardcache.shared.protocol import Json
from shardcache.shared.units import size
from shardcache.shared.urls.local_urls import from_here

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from shardcache.cli.admin_client import Lines

# Exit codes.
FAILED = 1
USAGE = 2
NO_DAEMON = 3
INTERRUPTED = 130

_JSON_KEY = "shardcache.json"
_PIPE_COLUMNS = 10_000  # wider than any url: a pipe has no edge to wrap at

Command = TypeVar("Command", bound=Callable[..., Any])
AnyCommand = TypeVar("AnyCommand", bound=click.Command)
T = TypeVar("T")


class Family(click.Group):
    """A group of commands, listed in order of use with their whole summaries."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the command names in order of use, not alphabetically."""
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands; a summary that is too long for its line is wrapped, not cut."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    (name, command.get_short_help_str(10_000))
                    for name, command in self.commands.items()
                ]
            )


def examples(*commands: str) -> Callable[[AnyCommand], AnyCommand]:
    """Add examples to the end of a command's help, before its epilog."""

    def add(command: AnyCommand) -> AnyCommand:
        lines = (f"  shardcache {each}" for each in commands)
        command.epilog = "\n".join(("\b", "Examples:", *lines, "", command.epilog or ""))
        return command

    return add


def complete_path(_ctx: click.Context, _param: click.Parameter, typed: str) -> list[CompletionItem]:
    """Have the shell complete an argument that may be a local path."""
    return [CompletionItem(typed, type="file")]


def parse_size(text: str) -> int:
    """Parse an option's size into bytes. Raises click.BadParameter."""
    from shardcache.config.amounts import DiskAmount

    try:
        found = DiskAmount.parse(text)
    except ValueError:
        found = DiskAmount()
    if found.value_bytes < 1:
        raise click.BadParameter(f"{text!r} is not a size; write 256MiB or 1GB")
    return found.value_bytes


def _remember(ctx: click.Context, _param: click.Parameter, value: bool) -> bool:
    """Note for `report` whether the command prints JSON."""
    ctx.meta[_JSON_KEY] = value
    return value


def json_option(command: Command) -> Command:
    """Add `--json` as the argument `as_json`; errors are then printed as JSON too."""
    option = click.option("--json", "as_json", is_flag=True, callback=_remember, help="Print JSON.")
    return option(command)


def query_options(command: Command) -> Command:
    """Add the options of commands that ask the daemon.

    `json_option`, and `--socket` as `socket`, None if not given.
    """
    help_text = (
        "The daemon's Unix socket.  [default: $SHARDCACHE_SOCKET, else the standard locations]"
    )
    # Not checked here: connecting says more about a socket that one may not use.
    kind = click.Path(path_type=Path, readable=False)
    return json_option(click.option("--socket", type=kind, help=help_text)(command))


def urls_argument(command: Command) -> Command:
    """Add `URL...` as the argument `urls`, absolute."""
    argument = click.argument(
        "urls",
        nargs=-1,
        required=True,
        type=from_here,
        metavar="URL...",
        shell_complete=complete_path,
    )
    return argument(command)


async def in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a daemon thread, which is not joined at exit.

    A disk or daemon that hangs must not block a command. If the caller is cancelled, the thread is
    abandoned.
    """
    import asyncio
    from concurrent.futures import Future
    from threading import Thread

    future: Future[T] = Future()
    # So that it accepts a result even after its waiter was cancelled.
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as exn:  # noqa: BLE001  # raised where the result is awaited
            future.set_exception(exn)

    Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(future)


def print_json(value: object) -> None:
    """Print a JSON value on one line."""
    click.echo(json.dumps(value, ensure_ascii=False))


def fail() -> NoReturn:
    """End the command with exit code 1; the reason has already been printed."""
    click.get_current_context().exit(FAILED)


def report(error: ShardcacheError, ctx: click.Context) -> int:
    """Print an error, where it happened and what to do; return its exit code."""
    click.echo(f"{click.style('error:', fg='red', bold=True)} {error.message}", err=True)
    if error.url:
        click.echo(f"  Where: {error.url}", err=True)
    if error.remedy:
        click.echo(f"  What to do: {error.remedy}", err=True)
    if ctx.meta.get(_JSON_KEY):
        print_json({"error": error.to_json()})
    if isinstance(error, NoDaemonError):
        return NO_DAEMON
    return USAGE if isinstance(error, ConfigError) else FAILED


# Text and tables


def make_console(*, stderr: bool = False) -> Console:
    """Return a console for a terminal, or for a pipe or file."""
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    if console.is_terminal:
        return console
    return Console(stderr=stderr, highlight=False, width=_PIPE_COLUMNS, color_system=None)


def make_table(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """Return a table without borders: unobtrusive on a terminal, easy to `cut` in a pipe."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in columns:
        right = column in numbers
        table.add_column(
            one_line(column),
            justify="right" if right else "left",
            no_wrap=right,
            overflow="fold",
            header_style="dim",
        )
    return table


def print_table(
    columns: Iterable[str],
    rows: Iterable[Iterable[str | Text]],
    numbers: tuple[str, ...] = (),
) -> None:
    """Print a table of plain texts (never markup).

    Columns of `numbers` are aligned to the right.
    """
    from rich.text import Text

    table = make_table(*columns, numbers=numbers)
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    make_console().print(table)


def one_line(text: str, style: str = "") -> Text:
    """Return plain text (never markup) that a narrow column truncates at the end."""
    from rich.text import Text

    return Text(text, style, no_wrap=True, overflow="ellipsis")


def count(number: int, noun: str) -> str:
    """Return `1 shard`, `2,000 shards`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}s"


def readable(event: Json) -> Json:
    """Return an event with sizes and numbers of things as people read them.

    `intact` are shards that did not fail.
    """
    shown: Json = {"intact": count(event.get("shards", 0) - event.get("failed", 0), "shard")}
    shown["refused"] = 0  # a daemon of an earlier release does not count them
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


# Long work over shards


@contextmanager
def byte_progress(console: Console, label: str) -> Iterator[Callable[[Json], None]]:
    """Show a progress bar in bytes and shards, hidden if the output is not a terminal.

    Yields a function that shows an event's `done_bytes`, `total_bytes`, `done_shards` and `shards`.
    """
    from rich import progress

    text = progress.TextColumn
    bar = progress.BarColumn()
    numbers = (
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    columns = (text("{task.description}"), bar, *numbers, text("{task.fields[shards]}"))
    with progress.Progress(
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as shown:
        task = shown.add_task(label, total=None, shards="")

        def update(event: Json) -> None:
            if "done_shards" in event:
                shown.update(task, shards=f"{event['done_shards']:,}/{event['shards']:,} shards")
            shown.update(task, completed=event.get("done_bytes"), total=event.get("total_bytes"))

        yield update


def print_lines(lines: Iterable[Json]) -> int:
    """Print each line of an answer as JSON; return the number of shards that failed."""
    failed = 0
    for line in lines:
        print_json(line)
        if line.get("event") == "error" or line.get("ok") is False:
            failed += 1
    return failed


def carry_out(
    events: Lines,
    as_json: bool,
    label: str,
    summary: str,
    *,
    otherwise: Callable[[], str] = str,
    each_shard: bool = False,
    stderr: bool = False,
) -> None:
    """Show the progress of the daemon's work on many shards until it is done.

    Exit 1 if a shard failed.

    Args:
        summary: the last line to print, with the fields of `readable` for the `done` event.
        otherwise: returns a line to print after it if a shard failed; an empty one is not printed.
        each_shard: True to print a line per shard if there is no terminal for a progress bar.
        stderr: True to leave standard output to what the command prints there.
    """
    with closing(events):
        if as_json:
            failed = print_lines(events)
        else:
            console = make_console(stderr=stderr)
            done, failed = _follow(events, console, label, each_shard=each_shard)
            console.print(summary.format_map(readable(done)), markup=False)
            advice = otherwise() if failed else ""
            if advice:
                console.print(advice, markup=False)
    if failed:
        fail()


def _follow(
    events: Iterable[Json],
    console: Console,
    label: str,
    *,
    each_shard: bool,
) -> tuple[Json, int]:
    """Show the progress, each failure as it occurs, and each distinct remedy once at the end.

    Returns the work's `done` event and the number of failures.
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
                case "shard" if each_shard and not console.is_terminal:
                    line = f"{event['state']}  {size(event['size_bytes'])}  {event['url']}"
                    console.print(line, markup=False)
                case "retrying":
                    console.print(f"retrying  {event['url']}: {event['message']}", markup=False)
                case "error":
                    show_failure(event["error"])
                case "done":
                    done = event
    for remedy in dict.fromkeys(error["remedy"] for error in failures if error.get("remedy")):
        console.print(f"  What to do: {remedy}", markup=False)
    return done, len(failures)
