"""A folder of files as the kubelet mounts a ConfigMap or Secret: links into a folder that is replaced as a whole."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

_DATA = "..data"


class MountedFiles:
    """Folder whose files all change at the same moment.

    Each file is a link into `..data`, which is a link to a folder with the current files.

    Attributes:
        folder: the folder; created if it is missing.
    """

    def __init__(self, folder: Path, mode: int = 0o644, group: int | None = None) -> None:
        self.folder, self._mode, self._group = folder, mode, -1 if group is None else group
        folder.mkdir(parents=True, exist_ok=True)

    def replace(self, files: Mapping[str, str]) -> None:
        """Replace all files by others."""
        fresh = Path(tempfile.mkdtemp(prefix="..", dir=self.folder))
        fresh.chmod(0o755)
        for name, text in files.items():
            (fresh / name).write_text(text)
            os.chown(fresh / name, -1, self._group)
            (fresh / name).chmod(self._mode)
        data, renamed = self.folder / _DATA, self.folder / "..data_tmp"
        former = data.resolve() if data.is_symlink() else None
        renamed.symlink_to(fresh.name)
        renamed.replace(data)
        for name in files:
            if not (self.folder / name).is_symlink():
                (self.folder / name).symlink_to(f"{_DATA}/{name}")
        for path in self.folder.iterdir():
            if path.is_symlink() and not path.exists():
                path.unlink()
        if former is not None:
            shutil.rmtree(former)
