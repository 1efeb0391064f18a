"""Man pages of click commands, as roff. Pure.

click-man, the library for this, omits options that a command adds in `get_params`, as `serve` does with all of its own,
and the epilog, and cuts the summaries of commands.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping

import click

from shardcache.cli.common import summary

_CODE = re.compile(r"`([^`]+)`")


def pages(root: click.Group, name: str, version: str) -> Mapping[str, str]:
    """Return the page of a program, and of each of its commands, by file name."""
    context = click.Context(root, info_name=name, **root.context_settings)
    return {f"{_page_name(each)}.1": _page(each, version) for each in contexts(context)}


def contexts(context: click.Context) -> Iterator[click.Context]:
    """Yield the context of a command, and those of all commands below it."""
    yield context
    if isinstance(context.command, click.Group):
        for command in context.command.commands.values():
            yield from contexts(click.Context(command, parent=context, info_name=command.name))


def _page(context: click.Context, version: str) -> str:
    command, name = context.command, _page_name(context)
    records = (param.get_help_record(context) for param in command.get_params(context))
    usage = _text(" ".join(command.collect_usage_pieces(context)))
    sections = {
        "NAME": [f"{_escaped(name)} \\- {_text(summary(command).rstrip('.'))}"],
        "SYNOPSIS": [f"\\fB{_escaped(context.command_path)}\\fP {usage}"],
        "DESCRIPTION": list(_paragraphs(command.help or "")),
        "OPTIONS": [line for record in records if record and record[1] for line in _entry(*record)],
        "COMMANDS": list(_commands(context)),
        _title(command.epilog or ""): list(_paragraphs(command.epilog or "")),
        "SEE ALSO": list(_see_also(context)),
    }
    head = f'.TH "{name.upper()}" "1" "" "shardcache {version}" "shardcache"'
    body = (line for title, lines in sections.items() if lines for line in (f'.SH "{title}"', *lines))
    return "\n".join((head, *body)) + "\n"


def _commands(context: click.Context) -> Iterator[str]:
    if isinstance(context.command, click.Group):
        for name, command in context.command.commands.items():
            yield from _entry(name, summary(command))


def _see_also(context: click.Context) -> Iterator[str]:
    """Yield references to the pages of the commands below this one, else to the one above."""
    below = context.command.commands if isinstance(context.command, click.Group) else {}
    own = _page_name(context)
    others = [f"{own}-{name}" for name in below] or ([_page_name(context.parent)] if context.parent else [])
    yield ", ".join(f"\\fB{_escaped(other)}\\fP(1)" for other in others)


def _title(epilog: str) -> str:
    return "EXIT STATUS" if epilog.startswith("Exit codes:") else "NOTES"


def _entry(term: str, text: str) -> Iterator[str]:
    yield ".TP"
    names, _, value = term.partition(" ") if "," not in term else (term, "", "")
    yield f"\\fB{_escaped(names)}\\fP {_escaped(value)}".rstrip()
    yield _text(text)


def _paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a help text; those that click does not wrap stay as they are."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if not paragraph:
            continue
        yield ".PP"
        if paragraph.startswith("\b\n"):
            yield ".nf"
            yield from map(_text, paragraph.splitlines()[1:])
            yield ".fi"
        else:
            yield _text(" ".join(paragraph.split()))


def _text(line: str) -> str:
    """Return a line of text as roff: code in bold, and nothing in it a request."""
    marked = _CODE.sub(r"\\fB\1\\fP", _escaped(line))
    return f"\\&{marked}" if marked.startswith((".", "'")) else marked


def _escaped(text: str) -> str:
    known = text.replace("\\", "\\e").replace("-", "\\-")
    return "".join(char if char.isascii() else f"\\[u{ord(char):04X}]" for char in known)


def _page_name(context: click.Context) -> str:
    return context.command_path.replace(" ", "-")
