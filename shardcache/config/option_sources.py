"""Sources of the options: flags, environment and file.

`Settings` gets the values of all options from `Sources`, and names an option's source in errors.
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
        """Return the values that are set, as they are written.

        The values of keys in the file that are not options are returned as well.

        Args:
            names: names of the options, each of which an environment variable may set.

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

    def kind(self, name: str) -> str:
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
            loc: pydantic's location: `(option,)`; or `(option, number)` for an entry of `allow` or
                an `[[origin]]` table, counted from 0, and `(option, number, key)` for a key of it.
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
        """Return the environment variable that sets an option, in upper or lower case."""
        wanted = VARIABLE_PREFIX + name.upper()
        return next((variable for variable in self.env if variable.upper() == wanted), None)
