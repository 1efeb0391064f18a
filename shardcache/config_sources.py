"""Sources of the daemon's options: the flag, the variable or the line of the config file that sets each of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE_PREFIX = "SHARDCACHE_"


@dataclass(frozen=True, slots=True)
class Sources:
    """Flags, environment and config file, in this order of precedence."""

    flags: Mapping[str, Any]
    env: Mapping[str, str]
    file: Path

    def kind(self, name: str) -> str:
        """Return `flag`, `environment` or `file` for an option that is set."""
        if name in self.flags:
            return "flag"
        return "file" if self._variable(name) is None else "environment"

    def place(self, loc: tuple[int | str, ...]) -> str:
        """Return where an option, or a part of one, is set: `--capacity`, `$SHARDCACHE_CAPACITY`, or a line."""
        name = str(loc[0])
        if name in self.flags:
            return "--" + name.replace("_", "-")
        if variable := self._variable(name):
            return f"${variable}"
        dotted = ".".join(str(part) for part in loc if not str(part).startswith("function-"))
        line = self._line(loc)
        return f"{dotted} in {self.file}" + (f", line {line}" if line else "")

    def _variable(self, name: str) -> str | None:
        return next((each for each in self.env if each.upper() == VARIABLE_PREFIX + name.upper()), None)

    def _line(self, loc: tuple[int | str, ...]) -> int | None:
        """Return the line number of a key in the file, or else of its table."""
        table, count, begins, wanted = "", 0, None, [str(part) for part in loc if isinstance(part, str)]
        number = next((part for part in loc if isinstance(part, int)), 0)
        for at, text in enumerate(self.file.read_text().splitlines(), 1):
            if header := re.match(r"\s*\[+\s*([\w.-]+)\s*\]+", text):
                count = count + 1 if header[1] == table else 1
                table = header[1]
            is_in_table = table == wanted[0] and count == number + 1
            begins = at if is_in_table and begins is None else begins
            key = wanted[0] if not table else wanted[1] if is_in_table and len(wanted) > 1 else None
            if key is not None and re.match(rf"""\s*["']?{re.escape(key)}["']?\s*=""", text):
                return at
        return begins
