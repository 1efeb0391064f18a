"""A node's part in a pod: its volumes, its network, its containers, their probes and their end.

No cluster is needed: the spec is carried out by an OCI runtime, runc, as the kubelet has it carried out.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from support.cluster.network import Host
from support.disks.volumes import Objects, Volumes
from support.platforms.images import Image
from support.platforms.oci import SECCOMP_PROFILE, Json, Mount, Process, Security, runtime_config
from support.platforms.rendered import INSTALL
from support.platforms.sandbox import Sandbox
from support.programs.daemon import eventually

_LIMIT_S = 120.0
_RUNTIME = ("runc",)


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A machine of the cluster: a folder, below which its own filesystem is.

    Attributes:
        root: that folder.
        ip: the address that pods on it have, unless each has a network of its own.
        objects: ConfigMaps and Secrets, each name's data.
        host: network of the node, to which those of its pods are connected; None for no networks but this process's.
    """

    root: Path
    ip: str
    objects: Objects
    host: Host | None = None

    def path(self, absolute: str) -> Path:
        """Return where a path of the node really is."""
        return self.root / "host" / absolute.lstrip("/")

    @property
    def name(self) -> str:
        """Name of the node in the cluster."""
        return self.root.name


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
        self.volumes = Volumes(self._root / "volumes", node.path("/"), spec, node.objects)
        self.containers: dict[str, Container] = {}
        self._sandbox: Sandbox | None = None

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

    def __enter__(self) -> Self:
        """Connect it to its node's network, and start all its containers once the others have run."""
        with ExitStack() as stack:
            stack.callback(self.volumes.remove)
            if self.node.host is not None:
                ports = [port for container in self.spec["containers"] for port in container.get("ports", ())]
                name = f"{self.node.root.name}-{self.name}"
                self._sandbox = Sandbox(name, self.node.host, self.node.root / "cni", ports)
                stack.callback(self._sandbox.remove)
            stack.callback(self._delete)
            self.run_init_containers()
            for container in self.spec["containers"]:
                self.containers[container["name"]] = self._start(container)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exn: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def restart(self, name: str) -> None:
        """Start a container that has ended again, as the kubelet does."""
        (spec,) = (container for container in self.spec["containers"] if container["name"] == name)
        self.containers[name].delete()
        self.containers[name] = self._start(spec)

    def _delete(self) -> None:
        for container in self.containers.values():
            container.delete()

    @property
    def ip(self) -> str:
        """The pod's address."""
        return self.node.ip if self._sandbox is None else self._sandbox.address

    def _start(self, spec: Mapping[str, Any]) -> Container:
        bundle = self._root / spec["name"]
        shutil.rmtree(bundle, ignore_errors=True)
        bundle.mkdir(parents=True)
        mounts = [*map(self._mount, spec["volumeMounts"]), *self._image.mounts()]
        process = Process(self._args(spec), self._environment(spec))
        root = self._image.lay_out(bundle / "rootfs")
        network = None if self._sandbox is None else self._sandbox.network.path
        config = runtime_config(root, process, Security.of(self.spec, spec), mounts, network)
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
        fields = {"status.podIP": self.ip, "spec.nodeName": self.node.name}
        for variable in spec.get("env", ()):
            match variable:
                case {"valueFrom": {"fieldRef": {"fieldPath": field}}}:
                    env[variable["name"]] = fields[field]
                case _:
                    env[variable["name"]] = _expanded(variable["value"], env)
        return env

    def _object(self, reference: Mapping[str, Any]) -> Mapping[str, str]:
        name = reference["name"]
        return self.node.objects.get(name, {}) if reference.get("optional") else self.node.objects[name]

    def _mount(self, mount: Mapping[str, Any]) -> Mount:
        propagation = {"HostToContainer": "rslave"}.get(mount.get("mountPropagation", ""), "rprivate")
        return Mount(self.volumes[mount["name"]], mount["mountPath"], mount.get("readOnly", False), propagation)


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
        self.delete()

    def delete(self) -> None:
        """End it and all its processes."""
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
