"""Links to cached files, with the objects' names: some libraries tell a format by the suffix.

<root>/names/ab/<key>/<name>    a symbolic link to <root>/shards/ab/<key>.tar

A link is made when a reader asks for it, and removed with its shard. It is disposable: where it
cannot be made, a file is handed out under its key. Everything here blocks: call it in a thread.
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

_MAX_NAME_BYTES = 255  # of a file, on the filesystems of Linux
_NO_NAMES = ("", ".", "..")


def name_of(facts: Facts) -> str | None:
    """Return the name of an object, without the suffix of a compression if it was decompressed.

    None if no file can have that name.
    """
    name = path_of(facts.url).rpartition("/")[2]
    if facts.samples is not None:  # shards are decompressed as they arrive, other files are not
        name = plain_name(name)
    if name in _NO_NAMES or "\0" in name:
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

    def path(self, key: str, facts: Facts) -> Path:
        """Return a path of a published shard that ends with its object's name.

        If no link can have that name or be made, return the path of the shard itself.
        """
        tar = self._layout.tar(key)
        name = name_of(facts)
        if name is None:
            return tar
        link = self._folder(key) / name
        try:
            self._make(link, tar)
        except OSError:  # a full or failing disk: the shard itself is there
            return tar
        return link

    def _make(self, link: Path, tar: Path) -> None:
        if link.is_symlink():
            return
        link.parent.mkdir(parents=True, exist_ok=True)
        # Another reader's request may make it at the same time.
        with contextlib.suppress(FileExistsError):
            # Relative, since a container may see the cache elsewhere.
            link.symlink_to(os.path.relpath(tar, link.parent))

    def remove(self, key: str) -> None:
        """Remove the links to a shard, if there are any."""
        shutil.rmtree(self._folder(key), ignore_errors=True)

    def sweep(self, keys: Container[str]) -> None:
        """Remove the links to all shards but those with `keys`."""
        for folder in self._layout.names.glob("*/*"):
            if is_key(folder.name) and folder.name not in keys:
                self.remove(folder.name)

    def _folder(self, key: str) -> Path:
        return self._layout.names / key[:2] / key
