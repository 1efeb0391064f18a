"""Rights of a container's processes, as their kernel has them."""

from __future__ import annotations

from support.platforms.pods import Container

_PROGRAM = """
import glob, os, sys
folder = sys.argv[1]
open(folder + "/of-its-own", "w").close()
os.unlink(folder + "/of-its-own")
print("root:", "read-only" if os.statvfs("/").f_flag & os.ST_RDONLY else "writable")
for path in glob.glob("/proc/[0-9]*/status"):
    try:
        print(open(path).read())
    except OSError:
        pass
"""
_WANTED = ("Uid", "Gid", "Groups", "CapEff", "CapBnd", "NoNewPrivs", "Seccomp")
_STRICT = {
    "Uid": "52780 52780 52780 52780",
    "Gid": "52780 52780 52780 52780",
    "Groups": "52780",
    "CapEff": "0" * 16,
    "CapBnd": "0" * 16,
    "NoNewPrivs": "1",
    "Seccomp": "2",
    "root": "read-only",
}


def check_confined(container: Container, folder: str) -> None:
    """Raise AssertionError unless all its processes run as shardcache, without a right.

    They have no capability and are under seccomp; they can write to a folder, and to nothing of their image.
    """
    done = container.exec("python", "-c", _PROGRAM, folder)
    lines = [line.split(":", 1) for line in done.stdout.splitlines() if ":" in line]
    found = {(name, " ".join(value.split())) for name, value in lines if name in (*_WANTED, "root")}
    assert found == set(_STRICT.items()), (found, done.stderr)
