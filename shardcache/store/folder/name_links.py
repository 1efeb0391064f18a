"""Links to cached files that have the objects' names.

<root>/names/ab/<key>/<name>    a symbolic link to <root>/shards/ab/<key>.tar

A cached file is named by its key, but some libraries recognise a file's format by the suffix of its
name. A link is made when a reader requests a path with the object's name, and removed with its
shard. If a link cannot be made, the reader gets the path of the file itself. All methods block:
call them in a thread.
"""

import contextlib
import os
import shutil
from collections.abc import Container
from pathlib import Path

from shardcache.shared.urls.url_names import path_of, plain_name
from shardcache.store.folder.layout import Layout
from shardcache.store.keys import is_key
from shardcache.store.shard import Facts

_MAX_NAME_BYTES = 255  # longest name of a file on Linux filesystems
_NO_FILE_NAMES = ("", ".", "..")


def name_of(facts: Facts) -> str | None:
    """Return the file name for a cached object; None if no file can have the object's name.

    The name is the last part of the url's path, without the suffix of a compression if the object
    was decompressed.
    """
    name = path_of(facts.url).rpartition("/")[2]
    # Only shards have samples. They are decompressed once they have arrived, other files are not.
    if facts.samples is not None:
        name = plain_name(name)
    if name in _NO_FILE_NAMES or "\0" in name:
        return None
    if len(os.fsencode(name)) > _MAX_NAME_BYTES:
        return None
    return name


class NameLinks:
    """The links to the shards of one cache folder."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def __repr__(self) -> str:
        return f"NameLinks({str(self._layout.names)!r})"

    def link(self, key: str, facts: Facts) -> Path:
        """Make a link to a published shard that has its object's name; return the link's path.

        If no link can have that name or be made, return the path of the shard itself.
        """
        tar = self._layout.tar(key)
        name = name_of(facts)
        if name is None:
            return tar
        link = self._folder(key) / name
        try:
            self._make(link, tar)
        except OSError:
            # The disk is full or failing. The shard itself can still be read.
            return tar
        return link

    def _make(self, link: Path, tar: Path) -> None:
        """Make a link to a shard's tar, unless there is one already. Raises OSError."""
        if link.is_symlink():
            return
        link.parent.mkdir(parents=True, exist_ok=True)
        # Another reader's request may make the link at the same time.
        with contextlib.suppress(FileExistsError):
            # The link is relative, as a container may see the cache folder at another path.
            link.symlink_to(os.path.relpath(tar, link.parent))

    def remove(self, key: str) -> None:
        """Remove the links to a shard, if there are any."""
        shutil.rmtree(self._folder(key), ignore_errors=True)

    def sweep(self, keys: Container[str]) -> None:
        """Remove the links to all shards whose keys are not among `keys`."""
        for folder in self._layout.names.glob("*/*"):
            if is_key(folder.name) and folder.name not in keys:
                self.remove(folder.name)

    def _folder(self, key: str) -> Path:
        """Return the folder of the links to one shard."""
        return self._layout.names / key[:2] / key
