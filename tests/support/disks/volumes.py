"""A pod's volumes on a node, as the kubelet makes them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.disks.mounted_files import MountedFiles

_MEMORY = Path("/dev/shm")

Objects = Mapping[str, Mapping[str, str]]
"""Data of ConfigMaps and Secrets by their names."""


class Volumes:
    """Folders of a pod's volumes.

    Args:
        folder: holds those that are not folders of the node.
        host: the node's root.
        spec: the pod's.
        objects: ConfigMaps and Secrets; read again by `sync`.

    Raises FileNotFoundError if a hostPath has to exist and does not: the pod would wait for it.
    """

    def __init__(self, folder: Path, host: Path, spec: Mapping[str, Any], objects: Objects) -> None:
        self._folder, self._host, self._objects = folder, host, objects
        self._group = spec["securityContext"].get("fsGroup", 0)
        self._mounted: list[tuple[Mapping[str, Any], MountedFiles]] = []
        self._in_memory: list[tempfile.TemporaryDirectory[str]] = []
        self._paths = {volume["name"]: self._make(volume) for volume in spec["volumes"]}
        self.sync()

    def __getitem__(self, name: str) -> Path:
        return self._paths[name]

    def sync(self) -> None:
        """Mount ConfigMaps and Secrets as they are now."""
        for volume, mounted in self._mounted:
            mounted.replace(self._files(volume))

    def remove(self) -> None:
        """Delete those in memory."""
        for folder in self._in_memory:
            folder.cleanup()

    def _make(self, volume: Mapping[str, Any]) -> Path:
        path: Path
        match volume:
            case {"hostPath": {"path": where, "type": kind}}:
                return self._host_path(self._host / where.lstrip("/"), kind)
            case {"emptyDir": {"medium": "Memory"}}:
                self._in_memory.append(tempfile.TemporaryDirectory(prefix="pod-", dir=_MEMORY))
                path = Path(self._in_memory[-1].name)
            case {"emptyDir": _}:
                path = self._folder / volume["name"]
                path.mkdir(parents=True, exist_ok=True)
            case {"configMap": _}:
                path = self._mount(volume, 0o644)
            case {"secret": {"defaultMode": mode}} | {"projected": {"defaultMode": mode}}:
                path = self._mount(volume, mode)
            case _:
                raise ValueError(f"a volume of an unknown kind: {volume}")
        os.chown(path, 0, self._group)
        path.chmod(0o2777)
        return path

    def _mount(self, volume: Mapping[str, Any], mode: int) -> Path:
        mounted = MountedFiles(self._folder / volume["name"], mode, self._group)
        self._mounted.append((volume, mounted))
        return mounted.folder

    def _files(self, volume: Mapping[str, Any]) -> dict[str, str]:
        sources = volume["projected"]["sources"] if "projected" in volume else (volume,)
        return {name: text for source in sources for name, text in self._source(source).items()}

    def _source(self, source: Mapping[str, Any]) -> Mapping[str, str]:
        reference = source.get("configMap") or source["secret"]
        name = reference.get("name") or reference["secretName"]
        if reference.get("optional") and name not in self._objects:
            return {}
        data = self._objects[name]
        return {item["path"]: data[item["key"]] for item in reference["items"]} if "items" in reference else data

    def _host_path(self, path: Path, kind: str) -> Path:
        if kind == "DirectoryOrCreate" and not path.exists():
            path.mkdir(parents=True, mode=0o755)
        if not path.is_dir():
            raise FileNotFoundError(f"hostPath {path} is no directory")
        return path
