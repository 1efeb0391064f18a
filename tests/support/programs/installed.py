"""Virtual environments with nothing but a package and what it declares, made without a network."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Iterator, Mapping
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.programs.guard import GUARD_S


class Environment:
    """An empty virtual environment, into which `install` puts a package and its requirements, and nothing else.

    Requirements are links to this interpreter's own packages: exactly those that the package's metadata names for the
    extras, and that these name in turn. A requirement that is used and not declared is therefore missing.
    """

    def __init__(self, folder: Path) -> None:
        """Make it, without pip."""
        venv.create(folder, symlinks=True, with_pip=False)
        self.bin = folder / "bin"
        self.python = self.bin / "python"
        (self._packages,) = (folder / "lib").glob("python*/site-packages")

    def pip(self, *args: str, cwd: Path | None = None) -> str:
        """Run this interpreter's pip on it without any index; return what it printed. It must succeed."""
        command = [sys.executable, "-m", "pip", "--python", str(self.python), *args]
        env = {**os.environ, "PIP_NO_INDEX": "1", "PIP_NO_INPUT": "1", "PIP_FIND_LINKS": ""}
        done: subprocess.CompletedProcess[str] = subprocess.run(
            command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=GUARD_S
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def install(self, wheel: Path, *extras: str) -> None:
        """Install a wheel with extras: the wheel by pip, its requirements as links. pip must find none missing."""
        self.pip("install", "--no-deps", str(wheel))
        name = wheel.name.partition("-")[0]
        (installed,) = distributions(name=name, path=[str(self._packages)])
        for requirement in self._closure(installed, {"", *extras}, {}):
            self._link(requirement)
        self.pip("install", f"{name}[{','.join(extras)}]")

    def link(self, name: str) -> None:
        """Add an installed package and its requirements."""
        package = distribution(name)
        for each in (package, *self._closure(package, {""}, {})):
            self._link(each)

    def run(self, *command: str | Path, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run a program; the first word is looked up among those of this environment."""
        program, *args = command
        given = {**os.environ, **(env or {})}
        return subprocess.run(
            [self.bin / program, *args], env=given, capture_output=True, text=True, timeout=GUARD_S, check=False
        )

    def _closure(self, of: Distribution, extras: set[str], seen: dict[str, set[str]]) -> Iterator[Distribution]:
        for line in of.requires or ():
            wanted = Requirement(line)
            if wanted.marker and not any(wanted.marker.evaluate({"extra": extra}) for extra in extras):
                continue
            name, more = canonicalize_name(wanted.name), {"", *wanted.extras}
            if more <= seen.get(name, set()):
                continue
            found = of if name == canonicalize_name(of.name) else distribution(wanted.name)
            if name not in seen and found is not of:
                yield found
            seen[name] = seen.get(name, set()) | more
            yield from self._closure(found, more, seen)

    def _link(self, package: Distribution) -> None:
        """Link the files and folders of an installed package; one that packages share comes with all that is in it."""
        for name in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            link = self._packages / name
            if not link.is_symlink():
                link.symlink_to(Path(str(package.locate_file(name))))
