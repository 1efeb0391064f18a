"""A node's part in a pod: its folders, its config and secrets, its containers, their probes and their end.

No cluster is needed: the spec is carried out by an OCI runtime, runc, as the kubelet has it carried out.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.daemon import eventually
from support.images import Image
from support.oci import SECCOMP_PROFILE, Json, Mount, Process, Security, runtime_config
from support.rendered import INSTALL

_LIMIT_S = 120.0
_RUNTIME = ("runc",)


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A machine of the cluster: a folder, below which its own filesystem is.

    Attributes:
        root: that folder.
        ip: the address that pods on it have.
        objects: ConfigMaps and Secrets, each name's data.
    """

    root: Path
    ip: str
    objects: Mapping[str, Mapping[str, str]]

    def path(self, absolute: str) -> Path:
        """Return where a path of the node really is."""
        return self.root / "host" / absolute.lstrip("/")


def why_not() -> str | None:
    """Return why no pod can be carried out here, or None."""
    if os.geteuid() != 0:
        return "a container takes root"
    if shutil.which("kubectl") is None:
        return INSTALL
    if shutil.which(*_RUNTIME) is None or not SECCOMP_PROFILE.exists():
        return "needs runc and a seccomp profile: apt-get install runc golang-github-containers-common"
    return None


class Pod:
    """One pod on a node."""

    def __init__(self, name: str, spec: Mapping[str, Any], node: Node, image: Image, env: Mapping[str, str]) -> None:
        """Make its volumes. `env` is the image's own.

        Raises FileNotFoundError where a hostPath is to exist and does not: the pod would wait for it.
        """
        self.name, self.spec, self.node, self._image, self._env = name, spec, node, image, env
        self._root = node.root / name
        self._volumes = {volume["name"]: self._volume(volume) for volume in spec["volumes"]}

    def __repr__(self) -> str:
        return f"<Pod {self.name} on {self.node.root.name}>"

    def run_init_containers(self) -> None:
        """Run them, one after another. Raises RuntimeError when one fails."""
        for container in self.spec.get("initContainers", ()):
            running = self._start(container)
            if running.wait():
                raise RuntimeError(f"{container['name']} failed: {running.log()}")

    def start(self) -> Container:
        """Start its only container, once the others have run."""
        self.run_init_containers()
        (container,) = self.spec["containers"]
        return self._start(container)

    def _start(self, spec: Mapping[str, Any]) -> Container:
        bundle = self._root / spec["name"]
        shutil.rmtree(bundle, ignore_errors=True)
        bundle.mkdir(parents=True)
        mounts = [*map(self._mount, spec["volumeMounts"]), *self._image.mounts()]
        process = Process(self._args(spec), self._environment(spec))
        root = self._image.lay_out(bundle / "rootfs")
        config = runtime_config(root, process, Security.of(self.spec, spec), mounts)
        (bundle / "config.json").write_text(json.dumps(config))
        return Container(f"{self._root.parent.name}-{self.name}-{spec['name']}", bundle, spec)

    def _args(self, spec: Mapping[str, Any]) -> tuple[str, ...]:
        env = self._environment(spec)
        words = (*spec.get("command", (self._image.entrypoint,)), *spec.get("args", ()))
        return tuple(_expanded(word, env) for word in words)

    def _environment(self, spec: Mapping[str, Any]) -> dict[str, str]:
        env = dict(self._env)
        for source in spec.get("envFrom", ()):
            env |= self._object(source["secretRef"])
        for variable in spec.get("env", ()):
            value = variable.get("value")
            known = self.node.ip if value is None else _expanded(value, env)  # the only field that is asked for
            env[variable["name"]] = known
        return env

    def _object(self, reference: Mapping[str, Any]) -> Mapping[str, str]:
        name = reference["name"]
        return self.node.objects.get(name, {}) if reference.get("optional") else self.node.objects[name]

    def _mount(self, mount: Mapping[str, Any]) -> Mount:
        propagation = {"HostToContainer": "rslave"}.get(mount.get("mountPropagation", ""), "rprivate")
        return Mount(self._volumes[mount["name"]], mount["mountPath"], mount.get("readOnly", False), propagation)

    def _volume(self, volume: Mapping[str, Any]) -> Path:
        match volume:
            case {"hostPath": {"path": path, "type": kind}}:
                return self._host_path(self.node.path(path), kind)
            case {"emptyDir": _}:
                return self._files(volume["name"], {}, 0o644)
            case {"configMap": {"name": name}}:
                return self._files(volume["name"], self.node.objects[name], 0o644)
            case {"secret": {"secretName": name, "defaultMode": mode}}:
                return self._files(volume["name"], self.node.objects[name], mode)
        raise ValueError(f"a volume of an unknown kind: {volume}")

    def _host_path(self, path: Path, kind: str) -> Path:
        if kind == "DirectoryOrCreate" and not path.exists():
            path.mkdir(parents=True, mode=0o755)
        if not path.is_dir():
            raise FileNotFoundError(f"hostPath {path} is no directory")
        return path

    def _files(self, name: str, files: Mapping[str, str], mode: int) -> Path:
        group = self.spec["securityContext"].get("fsGroup", 0)
        folder = self._root / "volumes" / name
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (folder / file).write_text(text)
            os.chown(folder / file, 0, group)
            (folder / file).chmod(mode)
        os.chown(folder, 0, group)
        folder.chmod(0o2777)
        return folder


class Container:
    """A running container; it is deleted when the context that it opens is left."""

    def __init__(self, name: str, bundle: Path, spec: Mapping[str, Any]) -> None:
        self.name, self.spec = name, spec
        self._log = bundle / "log"
        with self._log.open("wb") as log:
            self._runtime = subprocess.Popen(
                (*_RUNTIME, "run", "--bundle", bundle, name), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def __repr__(self) -> str:
        return f"<Container {self.name}>"

    def __enter__(self) -> Container:
        return self

    def __exit__(self, *_exc: object) -> None:
        subprocess.run((*_RUNTIME, "delete", "--force", self.name), capture_output=True, check=False)
        self._runtime.wait(_LIMIT_S)

    def exec(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in it, as its own process's user."""
        return subprocess.run(
            (*_RUNTIME, "exec", self.name, *command),
            capture_output=True,
            text=True,
            check=False,
            timeout=_LIMIT_S,
        )

    def probe(self, kind: str) -> bool:
        """Run one of its probes once, as `startup`, `readiness` or `liveness`; tell whether it succeeded."""
        return self.exec(*self.spec[f"{kind}Probe"]["exec"]["command"]).returncode == 0

    def wait_until_started(self) -> None:
        """Repeat the startup probe until it succeeds. Raises RuntimeError when the container ends instead."""

        def started() -> bool:
            if self._runtime.poll() is not None:
                raise RuntimeError(f"{self.name} ended: {self.log()}")
            return self.probe("startup")

        eventually(started, limit_s=_LIMIT_S)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to its first process."""
        os.kill(self.state()["pid"], number)

    def state(self) -> Json:
        """Return what the runtime says of it."""
        done = subprocess.run((*_RUNTIME, "state", self.name), capture_output=True, text=True, check=True)
        state: Json = json.loads(done.stdout)
        return state

    def wait(self) -> int:
        """Wait until its process has ended; return the exit code."""
        return self._runtime.wait(_LIMIT_S)

    def log(self) -> str:
        """Return what it has printed."""
        return self._log.read_text(errors="replace")


def _expanded(text: str, env: Mapping[str, str]) -> str:
    for name, value in env.items():
        text = text.replace(f"$({name})", value)
    return text
