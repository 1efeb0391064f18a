"""The functions that each test file calls, in pytest's process and in forked daemons.

`make coverage` runs the tests with REACHED set to a folder: each process appends what it calls to a
file there that is named after the test file, at the first call, so that kill -9 loses nothing.
`make tests-of` reads these files.
"""

import os
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parent.parent
_SOURCES = (f"{ROOT}/shardcache/", f"{ROOT}/client/")


def record(path: Path) -> None:
    """Append the functions that this process calls from now on to a file, each once."""
    seen: set[int] = set()
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(frame: FrameType, _event: str, _arg: object) -> None:
        code = frame.f_code
        if id(code) not in seen:
            seen.add(id(code))
            if code.co_filename.startswith(_SOURCES) and code.co_name != "<module>":
                os.write(
                    out, f"{code.co_filename[len(str(ROOT)) + 1 :]}:{code.co_qualname}\n".encode()
                )

    threading.settrace(note)
    sys.settrace(note)  # called for each call, and for no line, as it returns no tracer


def tests_of(module: str, folder: Path) -> list[tuple[int, str]]:
    """Return the test files that call functions of a module, those that call most of them first."""
    counts: Counter[str] = Counter()
    for path in folder.iterdir():
        called = set(path.read_text().splitlines())
        counts[path.name.replace("+", "/")] = sum(each.startswith(f"{module}:") for each in called)
    return sorted(
        ((count, name) for name, count in counts.items() if count),
        key=lambda row: (-row[0], row[1]),
    )


def main() -> None:
    """Print them: `python -m reached FOLDER MODULE`."""
    folder = Path(sys.argv[1])
    module = sys.argv[2]
    for count, name in tests_of(module, folder):
        print(f"{count:4} {name}")


if __name__ == "__main__":
    main()
