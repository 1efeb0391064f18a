"""Local paths as absolute urls, since the daemon has another working directory than the user.

The client and the command line call these functions on urls that a user has written.
"""

import os
from collections.abc import Iterable


def absolute_urls(
    urls: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
) -> list[str]:
    """Return one url or several as a list, each as `absolute_url` makes it."""
    if isinstance(urls, str | os.PathLike):
        return [absolute_url(urls)]
    return [absolute_url(url) for url in urls]


def absolute_url(url: str | os.PathLike[str]) -> str:
    """Make local paths and patterns, including `file:path`, absolute.

    A folder gets a trailing slash, by which its url stands for all shards below it. Other urls are
    returned unchanged, as are webdataset's commands (`pipe:`).
    """
    text = os.fspath(url)
    if not text or "://" in text or text.startswith("pipe:"):
        return text
    path = text.removeprefix("file:")
    if not path.startswith("/"):
        path = _absolute(path)
    if not path.endswith("/") and os.path.isdir(path):  # noqa: PTH112
        return f"{path}/"
    return path


def _absolute(path: str) -> str:
    """Return a relative path or pattern as an absolute one.

    The disk is not asked about the path, because a pattern may be longer than a path can be.
    """
    # Only `.` and `..` at the beginning are resolved: the names that follow may be a pattern.
    folder = os.getcwd()  # noqa: PTH109
    while True:
        first, _, remaining = path.partition("/")
        if first == "..":
            folder = os.path.dirname(folder)  # noqa: PTH120
        elif first != ".":
            return os.path.join(folder, path)  # noqa: PTH118
        path = remaining


def local_path(url: str) -> str | None:
    """Return the path of a `file://` url or an absolute path; None for any other url."""
    path = url.removeprefix("file://")
    if not path.startswith("/"):
        return None
    return path
