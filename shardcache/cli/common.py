"""Options, exit codes and output that the commands share.

Output is formatted by rich on a terminal; elsewhere it is plain, and never wrapped or cut.
Functions import rich and asyncio themselves, as the package's docstring explains.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click
from click.shell_completion import CompletionItem

from shardcache.shared.exceptions import ConfigError, NoDaemonError, ShardcacheError
from shardcache.shared.urls.local_urls import absolute_url

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

# Exit codes
FAILED = 1
USAGE = 2
NO_DAEMON = 3
INTERRUPTED = 130

_JSON_KEY = "shardcache.json"  # key in `Context.meta` for the value of --json
_PIPE_COLUMNS = 10_000  # width of output to a pipe, wider than any url, so that nothing is wrapped
_MAX_SUMMARY_CHARS = 10_000  # more than any command's summary has, so that none is cut

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
AnyCommand = TypeVar("AnyCommand", bound=click.Command)
T = TypeVar("T")


class OrderedGroup(click.Group):
    """A group of commands, listed in the order of their definition with their whole summaries."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the command names in the order of their definition, not alphabetically."""
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands; a summary that is too long for its line is wrapped, not cut."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    (name, command.get_short_help_str(_MAX_SUMMARY_CHARS))
                    for name, command in self.commands.items()
                ]
            )


def examples(*commands: str) -> Callable[[AnyCommand], AnyCommand]:
    """Add examples to the end of a command's help, before its epilog."""

    def add(command: AnyCommand) -> AnyCommand:
        lines = [f"  shardcache {each}" for each in commands]
        keep_lines = "\b"  # click does not rewrap a paragraph that begins with this
        command.epilog = "\n".join([keep_lines, "Examples:", *lines, "", command.epilog or ""])
        return command

    return add


def complete_path(_ctx: click.Context, _param: click.Parameter, typed: str) -> list[CompletionItem]:
    """Let the shell complete an argument that may be a local path."""
    return [CompletionItem(typed, type="file")]


def parse_size(text: str) -> int:
    """Parse an option's size, such as 256MiB, into bytes. Raises click.BadParameter."""
    from shardcache.config.amounts import DiskAmount

    with suppress(ValueError):
        size_bytes = DiskAmount.parse(text).value_bytes
        if size_bytes > 0:  # it is 0 for a percentage of a disk, too
            return size_bytes
    raise click.BadParameter(f"{text!r} is not a size; write 256MiB or 1GB")


def json_option(command: Decorated) -> Decorated:
    """Add `--json` as the argument `as_json`; errors are then printed as JSON too."""
    option = click.option(
        "--json",
        "as_json",
        is_flag=True,
        callback=_record_json_flag,
        help="Print JSON.",
    )
    return option(command)


def _record_json_flag(ctx: click.Context, _param: click.Parameter, as_json: bool) -> bool:
    """Record the value of --json for `report_error`, and return it."""
    ctx.meta[_JSON_KEY] = as_json
    return as_json


def query_options(command: Decorated) -> Decorated:
    """Add the options of commands that ask the daemon: `--json` and `--socket`.

    `--socket` is the command's argument `socket`, which is None if the option is not given.
    """
    socket_option = click.option(
        "--socket",
        # The path is not checked here, since connecting gives better errors for a socket that the
        # user may not use.
        type=click.Path(path_type=Path, readable=False),
        help="The daemon's Unix socket.  "
        "[default: $SHARDCACHE_SOCKET, else the standard locations]",
    )
    return json_option(socket_option(command))


def urls_argument(command: Decorated) -> Decorated:
    """Add `URL...` as the argument `urls`; local paths are made absolute."""
    argument = click.argument(
        "urls",
        nargs=-1,
        required=True,
        type=absolute_url,
        metavar="URL...",
        shell_complete=complete_path,
    )
    return argument(command)


async def in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread of its own, and return its result.

    If the caller is cancelled, the thread is abandoned. The interpreter does not wait for the
    thread at exit, so that a disk or daemon that hangs cannot block a command.
    """
    import asyncio
    from concurrent.futures import Future
    from threading import Thread

    future: Future[T] = Future()
    # A future in the running state accepts a result even after its waiter was cancelled.
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as exn:  # noqa: BLE001  # the waiter gets it
            future.set_exception(exn)

    Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(future)


def print_json(value: object) -> None:
    """Print a JSON value on one line."""
    click.echo(json.dumps(value, ensure_ascii=False))


def fail() -> NoReturn:
    """End the command with exit code 1; the reason has already been printed."""
    click.get_current_context().exit(FAILED)


def report_error(error: ShardcacheError, ctx: click.Context) -> int:
    """Print an error, the place where it happened and its remedy; return the exit code for it."""
    click.echo(f"{click.style('error:', fg='red', bold=True)} {error.message}", err=True)
    if error.url:
        click.echo(f"  Where: {error.url}", err=True)
    if error.remedy:
        click.echo(f"  What to do: {error.remedy}", err=True)
    if ctx.meta.get(_JSON_KEY):
        print_json({"error": error.to_json()})
    if isinstance(error, NoDaemonError):
        return NO_DAEMON
    if isinstance(error, ConfigError):
        return USAGE
    return FAILED


# Text and tables


def make_console(*, stderr: bool = False) -> Console:
    """Return a console for a terminal, or for a pipe or file."""
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    if console.is_terminal:
        return console
    return Console(stderr=stderr, highlight=False, width=_PIPE_COLUMNS, color_system=None)


def make_table(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """Return a table without borders: unobtrusive on a terminal, easy to `cut` in a pipe.

    Args:
        columns: names of the columns.
        numbers: names of those columns that hold numbers, which are aligned to the right.
    """
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in columns:
        is_number = column in numbers
        table.add_column(
            one_line(column),
            justify="right" if is_number else "left",
            no_wrap=is_number,
            overflow="fold",
            header_style="dim",
        )
    return table


def print_table(
    columns: Iterable[str],
    rows: Iterable[Iterable[str | Text]],
    numbers: tuple[str, ...] = (),
) -> None:
    """Print a table whose cells are plain text, never rich's markup.

    The arguments `columns` and `numbers` are those of `make_table`.
    """
    from rich.text import Text

    table = make_table(*columns, numbers=numbers)
    for row in rows:
        # A str would be parsed as markup.
        cells = [Text(cell) if isinstance(cell, str) else cell for cell in row]
        table.add_row(*cells)
    make_console().print(table)


def one_line(text: str, style: str = "") -> Text:
    """Return plain text, never markup, which a narrow column truncates instead of wrapping."""
    from rich.text import Text

    return Text(text, style, no_wrap=True, overflow="ellipsis")


def quantity(number: int, noun: str) -> str:
    """Return a number of things as text: `1 shard`, `2,000 shards`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}s"
