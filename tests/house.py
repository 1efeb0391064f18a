"""The shape of the house: measures the source, prints a table, and fails above a limit.

    python tests/house.py [--json]

Sizes (lines, files, words, arguments) and densities are printed and have no limit: code and docs
take the room that a reader needs. Cycles and file names that occur twice fail; so does what makes a
file slow to read, which `house_checks` finds.
"""

import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grimp

import house_checks

ROOT = Path(__file__).parent.parent
SOURCES = ("shardcache", "client")
POSITION = ROOT / "client" / "shardcache_client" / "position"

LIMITS: dict[str, float] = {
    "cycles inside packages": 0,
    "file names that occur twice": 0,
}

MODELS = """\
httpcore 1.0.9                              31  31,469  5,111   30.1     0.4     9.2    0.1
uvicorn 0.54.0                              45  40,456  5,970   32.9     0.0     8.0    2.0
stamina 26.1.0                              10   4,509    801   26.6     0.0     5.0    0.1
grain 0.2.18, without its tests             72  59,279  9,720   30.9     1.0     3.5    0.2
mosaicml-streaming 0.13.0                  103  64,756  9,376   32.8     0.1     3.9    0.2
litdata 0.2.76                              75 160,204 21,272   35.6     0.7    15.4    3.5
webdataset 1.0.2                            18  20,251  2,943   26.2     1.0     3.7    0.6"""
"""The same measures of other projects' packages, from their wheels, to compare with."""

OF_USERS = (
    "ShardReader",
    "ShardcacheFileSystem",  # also the options of fsspec's
    "WebDataset",  # the arguments of webdataset's
)
"""Classes that users construct, whose arguments are options: they may have more of them."""


def files(*suffixes: str, under: tuple[str, ...] = SOURCES) -> list[Path]:
    """Return the files with one of `suffixes` under the folders `under` of the repository."""
    found = (
        path for folder in under for path in (ROOT / folder).rglob("*") if path.suffix in suffixes
    )
    return sorted(path for path in found if path.is_file())


def lines(paths: list[Path]) -> int:
    """Return the number of lines of `paths` together."""
    return sum(path.read_bytes().count(b"\n") for path in paths)


def constructors(paths: list[Path]) -> Iterator[tuple[int, str]]:
    """Yield the number of arguments of each `__init__` that is written out, and its class."""
    for path in paths:
        for owner in ast.walk(ast.parse(path.read_text())):
            if (
                not isinstance(owner, ast.ClassDef)
                or "Error" in owner.name
                or owner.name in OF_USERS
            ):
                continue
            for method in owner.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    yield (
                        len(method.args.args) + len(method.args.kwonlyargs) - 1,
                        f"{path.relative_to(ROOT)}: {owner.name}",
                    )


def cycles() -> list[str]:
    """Return the imports, as `importer > imported`, that make cycles among packages' children."""
    graph = grimp.build_graph("shardcache", "shardcache_client", cache_dir=None)
    packages = {name.rpartition(".")[0] for name in graph.modules} - {""}
    breakers = (graph.nominate_cycle_breakers(package) for package in packages)
    return sorted(f"{importer} > {imported}" for found in breakers for importer, imported in found)


def repeated_names(paths: list[Path]) -> list[str]:
    """Return the names of several files in any folders, except for packages and programs."""
    counts = Counter(path.name for path in paths if not path.name.startswith("__"))
    return sorted(name for name, count in counts.items() if count > 1)


def message_files(message: str = "more") -> list[Path]:
    """Return the files that define or name `message`, a request that all layers know."""
    pattern = re.compile(rf'def {message}\(|"{message}"')
    return [path for path in files(".py") if pattern.search(path.read_text())]


def position_classes() -> int:
    """Return the number of classes in the package that says where a reader is."""
    return sum(
        isinstance(node, ast.ClassDef)
        for path in POSITION.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
    )


def measures() -> dict[str, tuple[float, str]]:
    """Return each measure's value and the place that sets it, where there is one."""
    python = files(".py")
    rings = cycles()
    repeated = repeated_names(python)
    arguments, widest = max(constructors(python))
    message = message_files()
    words = sum(len(page.read_text().split()) for page in files(".md", under=("docs",)))
    return {
        "lines of Python and JavaScript": (lines(files(".py", ".js")), ""),
        "Python files": (len(python), ""),
        "cycles inside packages": (len(rings), "; ".join(rings)),
        "file names that occur twice": (len(repeated), ", ".join(repeated)),
        "files that a reader's message touches": (
            len(message),
            ", ".join(path.name for path in message),
        ),
        "arguments of a service's constructor": (arguments, widest),
        "classes of a reader's position": (position_classes(), ""),
        "lines of tests": (lines(files(".py", under=("tests",))), ""),
        "words in docs": (words, ""),
    }


def slow_to_read() -> list[str]:
    """Return what `house_checks` finds, and exceptions without use."""
    found = []
    unused = set(house_checks.EXCEPTIONS)
    for path in files(".py", under=(*SOURCES, "tests")):
        name = str(path.relative_to(ROOT))
        for line, check, what in house_checks.findings(path):
            if (name, check) in house_checks.EXCEPTIONS:
                unused.discard((name, check))
            else:
                found.append(f"{name}:{line}: {what}")
    return found + [
        f"{name}: no exception is needed for its {check}" for name, check in sorted(unused)
    ]


def density_of(folders: tuple[str, ...]) -> house_checks.Density:
    """Return how dense the files of some folders are together."""
    density = house_checks.Density()
    for path in files(".py", under=folders):
        density.add(path)
    return density


def print_densities() -> None:
    """Print how dense each room is."""
    rooms: dict[str, house_checks.Density] = {}
    for path in files(".py"):
        folder = path.parent.relative_to(ROOT)
        rooms.setdefault(str(folder), house_checks.Density()).add(path)
    print(f"{'room':40} {house_checks.HEADINGS}")
    for room, density in rooms.items():
        print(f"{room:40} {density.row()}")
    print(f"{'shardcache and client':40} {density_of(SOURCES).row()}")
    print(f"{'tests':40} {density_of(('tests',)).row()}")
    print(MODELS)


def main() -> int:
    """Print the tables; return 1 if a measure is above its limit, or a file slow to read."""
    found = measures()
    if "--json" in sys.argv[1:]:
        print(json.dumps({name: value for name, (value, _) in found.items()}, indent=2))
        return 0
    above = [name for name, limit in LIMITS.items() if name in found and found[name][0] > limit]
    for name, (value, place) in found.items():
        limit = f"of {LIMITS[name]:>4,}" if name in LIMITS else ""
        mark = "ABOVE" if name in above else ""
        print(f"{name:40} {value:>8,} {limit:7} {mark:5} {place}".rstrip())
    print()
    print_densities()
    slow = slow_to_read()
    if slow:
        print("", "slow to read:", *slow, sep="\n")
    return 1 if above or slow else 0


if __name__ == "__main__":
    sys.exit(main())
