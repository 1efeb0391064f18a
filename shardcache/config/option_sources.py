"""Sources of the options: flags, environment and file.

`Settings` gets the values of all options from `Sources`, and names an option's source in errors.

pydantic-settings could merge the sources, but does not tell which of them has set an option (its
issue 756), so `kind_of_source` and `place` would stay. In a trial with equal behaviour, that saved
one line of code, and each command that reads the settings started some 80 ms later.
"""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardcache.config.toml_lines import line_of

VARIABLE_PREFIX = "SHARDCACHE_"


@dataclass(frozen=True, slots=True)
class Sources:
    """Sources of the options, in order of precedence.

    Attributes:
        flags: only the flags that the user has given, by name of the option.
        env: the environment.
        file: path of the config file, which may be missing.
    """

    flags: Mapping[str, Any]
    env: Mapping[str, str]
    file: Path

    def values(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the values that are set, by name of the option, as they are written.

        Unknown keys in the file are returned as well, so that the caller can report them.

        Args:
            names: names of all options.

        Raises OSError or ValueError if the file is unusable.
        """
        values: dict[str, Any] = {}
        if self.file.exists():
            values |= tomllib.loads(self.file.read_text())
        for name in names:
            variable = self._variable(name)
            if variable is not None:
                values[name] = self.env[variable]
        return values | dict(self.flags)

    def kind_of_source(self, name: str) -> str:
        """Return `flag`, `environment` or `file` for an option that is set."""
        if name in self.flags:
            return "flag"
        if self._variable(name) is not None:
            return "environment"
        return "file"

    def place(self, loc: tuple[int | str, ...]) -> str:
        """Return the source of an option, or of a part of its value, for errors.

        The source is a flag such as `--capacity`, a variable such as `$SHARDCACHE_CAPACITY`, or a
        line of the file.

        Args:
            loc: pydantic's location: `(option,)` for an option; `(option, number)` for an entry of
                `allow` or an `[[origin]]` table, counted from 0; `(option, number, key)` for a key
                of that entry or table.
        """
        name = str(loc[0])
        if name in self.flags:
            return "--" + name.replace("_", "-")
        variable = self._variable(name)
        if variable is not None:
            return f"${variable}"

        dotted = ".".join(str(part) for part in loc)
        place = f"{dotted} in {self.file}"
        line = line_of(loc, self.file.read_text())
        return place if line is None else f"{place}, line {line}"

    def _variable(self, name: str) -> str | None:
        """Return the environment variable that sets an option, if there is one, in any case."""
        wanted = VARIABLE_PREFIX + name.upper()
        for variable in self.env:
            if variable.upper() == wanted:
                return variable
        return None
