"""The sdist and the wheel: complete, in order for PyPI, and enough for an environment that has nothing else."""

import json
import os
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from shardcache import __version__
from support.programs.daemon import Daemon, spawn
from support.programs.guard import GUARD_S
from support.shards.tars import make_tar, random_samples

pytestmark = pytest.mark.slow


class Environment:
    """An empty virtual environment, into which `install` puts a package and its requirements, and nothing else.

    Requirements are links to this interpreter's own packages: exactly those that the package's metadata names for the
    extras, and that these name in turn. A requirement that is used and not declared is therefore missing.
    """

    def __init__(self, folder: Path) -> None:
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


ROOT = Path(__file__).parents[3]

READ = """
import sys
from shardcache_client import ShardDataset
print(sum(1 for sample in ShardDataset(sys.argv[1], socket=sys.argv[2])))
"""


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of both packages, built as a release is: the sdist from the checkout, the wheel from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    run("build", "--no-isolation", "--outdir", folder, ROOT)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Environment:
    made = Environment(tmp_path_factory.mktemp("daemon"))
    made.install(wheel, "daemon")
    return made


def run(module: str, *args: str | Path) -> None:
    """Run one of Python's packaging tools. It must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", module, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=GUARD_S,
    )
    assert done.returncode == 0, done.stdout


def test_pypi_would_accept_and_show_them(dist: Path) -> None:
    """Twine finds no fault with the metadata and the README of either."""
    packages = sorted(path.name for path in dist.iterdir())
    assert packages == [f"shardcache-{__version__}-py3-none-any.whl", f"shardcache-{__version__}.tar.gz"]
    run("twine", "check", "--strict", *dist.iterdir())


def test_the_sdist_is_the_checkout(dist: Path) -> None:
    """Tests, documentation and image can be made from it: it has all that lies in the checkout and belongs to it."""
    with tarfile.open(next(dist.glob("*.tar.gz"))) as tar:
        packed = {name.partition("/")[2] for name in tar.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode:
        pytest.skip("the checkout has no git: nothing says which files belong to it")
    assert {name for name in tracked.stdout.splitlines() if (ROOT / name).is_file()} - packed == set()


def test_the_wheel_has_both_packages_and_nothing_else(wheel: Path) -> None:
    """Every module, page and marker of types below the two packages is in it; no test, and no third package."""
    with zipfile.ZipFile(wheel) as packed:
        names = {name for name in packed.namelist() if ".dist-info/" not in name}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "shardcache").rglob("*") if path.is_file()}
    client = ROOT / "client"
    sources |= {path.relative_to(client).as_posix() for path in client.rglob("*") if path.is_file()}
    assert names == {name for name in sources if "__pycache__" not in name}
    assert {"shardcache/py.typed", "shardcache_client/py.typed"} <= names


def test_a_daemon_and_a_training_image_need_no_more_than_they_declare(
    environment: Environment, wheel: Path, tmp_path: Path
) -> None:
    """With `shardcache[daemon]` alone a node serves; with `shardcache` and a torch alone a job reads from it."""
    image = Environment(tmp_path / "image")
    image.install(wheel, "torch")
    (tmp_path / "a.tar").write_bytes(make_tar(random_samples(10)))
    with tempfile.TemporaryDirectory() as folder:
        start = partial(spawn, python=str(environment.python))
        with Daemon(Path(folder), spawn=start) as daemon:
            socket = str(daemon.socket)
            warmed = environment.run("shardcache", "warm", f"{tmp_path}/a.tar", "--json", "--socket", socket)
            assert warmed.returncode == 0, warmed.stderr
            status = environment.run("shardcache", "status", "--json", "--socket", socket)
            assert json.loads(status.stdout)["version"] == __version__
            read = image.run("python", "-c", READ, f"{tmp_path}/a.tar", socket)
            assert read.stdout == "10\n", read.stderr
