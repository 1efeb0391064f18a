"""Lines of a TOML file on which options are set, for errors and for `shardcache config show`.

tomllib does not keep line numbers, and neither does tomlkit (its issue 55). Without them, an option
is hard to find: pydantic numbers the tables of one name from 0, and names only the number of a
wrong entry (`allow.3`).
"""

import re
from collections import Counter

_HEADER = re.compile(r"\s*\[+\s*([\w.-]+)\s*\]+")


def line_of(loc: tuple[int | str, ...], toml: str) -> int | None:
    """Return the number of the line that sets a key in a TOML file.

    If that line is not found, this returns the number of the line with the table's header; None if
    the header is not found either, as with a header in quotes.

    Args:
        loc: `(option,)`; or `(table, number, key)`, where `number` counts the tables of one name
            from 0.
        toml: text of the file, which is well-formed.
    """
    option, *keys = [part for part in loc if isinstance(part, str)]
    number = next((part for part in loc if isinstance(part, int)), 0)
    table = ""  # the table of the present line; empty before the first table
    headers = Counter[str]()  # number of tables of each name so far
    header_line = None  # number of the line with the header of the wanted table
    for line, text in enumerate(toml.splitlines(), 1):
        header = _HEADER.match(text)
        if header is not None:
            table = header[1]
            headers[table] += 1
        is_in_wanted_table = table == option and headers[table] == number + 1
        if is_in_wanted_table and header_line is None:
            header_line = line

        is_before_tables = not table
        if is_before_tables and _sets(text, option):
            return line
        if is_in_wanted_table and keys and _sets(text, keys[0]):
            return line
    return header_line


def _sets(text: str, key: str) -> bool:
    """Return whether a line of TOML sets a key, which may be quoted."""
    return re.match(rf"""\s*["']?{re.escape(key)}["']?\s*=""", text) is not None
