"""A node's part in a pod: its volumes, its network, its containers, their probes and their end.

No cluster is needed: the spec is carried out by an OCI runtime, runc, as the kubelet has it carried
out.
"""

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.cluster import network
from support.cluster.network import Host, Namespace
from support.disks.mounts import MountedFiles
from support.lifetime import Lifetime
from support.platforms.images import Image
from support.platforms.oci import SECCOMP_PROFILE, Json, Mount, Security, runtime_config
from support.platforms.rendered import INSTALL
from support.programs.daemon import eventually
from support.programs.processes import logged

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
        self._folder = folder
        self._host = host
        self._objects = objects
        self._group = spec["securityContext"].get("fsGroup", 0)
        self._mounted: list[tuple[Mapping[str, Any], MountedFiles]] = []
        self.in_memory = ExitStack()  # removes those in memory
        self._paths = {volume["name"]: self._make(volume) for volume in spec["volumes"]}
        self.sync()

    def __getitem__(self, name: str) -> Path:
        return self._paths[name]

    def sync(self) -> None:
        for volume, mounted in self._mounted:
            mounted.replace(self._files(volume))

    def _make(self, volume: Mapping[str, Any]) -> Path:
        path: Path
        match volume:
            case {"hostPath": {"path": where, "type": kind}}:
                return self._host_path(self._host / where.lstrip("/"), kind)
            case {"emptyDir": {"medium": "Memory"}}:
                folder = tempfile.TemporaryDirectory(prefix="pod-", dir=_MEMORY)
                path = Path(self.in_memory.enter_context(folder))
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
        if "items" not in reference:
            return data
        return {item["path"]: data[item["key"]] for item in reference["items"]}

    def _host_path(self, path: Path, kind: str) -> Path:
        if kind == "DirectoryOrCreate" and not path.exists():
            path.mkdir(parents=True, mode=0o755)
        if not path.is_dir():
            raise FileNotFoundError(f"hostPath {path} is no directory")
        return path


_PLUGINS = Path("/usr/lib/cni")


class Sandbox:
    """Network of one pod. `address`: the pod's, which only its node can reach."""

    def __init__(
        self, name: str, node: Host, folder: Path, ports: Sequence[Mapping[str, Any]]
    ) -> None:
        """Connect it to a node.

        Args:
            folder: of the plugins' files on this node.
            ports: of the pod's containers; those with a `hostPort` are published at the node's
                address.
        """
        self._name = name
        self._node = node
        self.network = Namespace()  # the namespace, by which containers join it
        with node.entered():
            Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        number = node.address.rpartition(".")[2]
        pool = {
            "type": "host-local",
            "dataDir": str(folder),
            "ranges": [[{"subnet": f"10.88.{number}.0/24"}]],
        }
        self._bridge: Json = {"type": "bridge", "bridge": "cni0", "isGateway": True, "ipMasq": True}
        self._bridge |= {"hairpinMode": True, "ipam": {**pool, "routes": [{"dst": "0.0.0.0/0"}]}}
        self._result = self._plugin("ADD", self._bridge)
        self.address = str(self._result["ips"][0]["address"].partition("/")[0])
        mapped = [
            {
                "hostPort": port["hostPort"],
                "containerPort": port["containerPort"],
                "protocol": port["protocol"].lower(),
            }
            for port in ports
            if "hostPort" in port
        ]
        self._portmap: Json = {
            "type": "portmap",
            "snat": True,
            "capabilities": {"portMappings": True},
        }
        self._portmap |= {"runtimeConfig": {"portMappings": mapped}, "prevResult": self._result}
        self._plugin("ADD", self._portmap)

    def remove(self) -> None:
        self._plugin("DEL", self._portmap)
        self._plugin("DEL", self._bridge)
        self.network.close()

    def _plugin(self, command: str, config: Json) -> Any:
        variables = {"COMMAND": command, "CONTAINERID": self._name, "NETNS": str(self.network.path)}
        variables |= {"IFNAME": "eth0", "PATH": str(_PLUGINS)}
        env = {
            "PATH": os.environ["PATH"],
            **{f"CNI_{name}": value for name, value in variables.items()},
        }
        with self._node.entered():
            done = subprocess.run(
                [_PLUGINS / config["type"]],
                input=json.dumps({"cniVersion": "0.4.0", "name": "pods", **config}),
                env=env,
                capture_output=True,
                text=True,
                check=False,
            )
        if done.returncode:
            raise RuntimeError(f"CNI's plugin {config['type']} failed: {done.stdout}{done.stderr}")
        return json.loads(done.stdout) if done.stdout else None


_LIMIT_S = 120.0
_RUNTIME = ("runc",)


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A machine of the cluster: a folder, below which its own filesystem is.

    Attributes:
        host: network of the node, to which those of its pods are connected; None for no networks
            but this process's.
    """

    root: Path  # that folder
    ip: str  # the address that pods on it have, unless each has a network of its own
    objects: Objects  # ConfigMaps and Secrets, each name's data
    host: Host | None = None

    def path(self, absolute: str) -> Path:
        """Return where a path of the node really is."""
        return self.root / "host" / absolute.lstrip("/")

    @property
    def name(self) -> str:
        return self.root.name


def why_not() -> str | None:
    """Return why no pod can be carried out here, or None."""
    if os.geteuid() != 0:
        return "a container takes root"
    if shutil.which("kubectl") is None:
        return INSTALL
    if shutil.which(*_RUNTIME) is None or not SECCOMP_PROFILE.exists():
        return (
            "needs runc and a seccomp profile: apt-get install runc golang-github-containers-common"
        )
    return None


def why_no_network() -> str | None:
    """Return why no pod can have a network of its own here, or None."""
    if all((_PLUGINS / kind).exists() for kind in ("bridge", "portmap")):
        return network.why_not()
    return "needs CNI's plugins and iptables: apt-get install containernetworking-plugins iptables"


class Pod(Lifetime):
    def __init__(
        self, name: str, spec: Mapping[str, Any], node: Node, image: Image, env: Mapping[str, str]
    ) -> None:
        """Make its volumes. `env` is the image's own.

        Raises FileNotFoundError where a hostPath is to exist and does not: the pod would wait for
        it.
        """
        self.name = name
        self.spec = spec
        self.node = node
        self._image = image
        self._env = env
        self._root = node.root / name
        self.volumes = Volumes(self._root / "volumes", node.path("/"), spec, node.objects)
        self.containers: dict[str, Container] = {}
        self._sandbox: Sandbox | None = None

    def __repr__(self) -> str:
        return f"<Pod {self.name} on {self.node.root.name}>"

    def begin(self) -> None:
        """Connect it to its node's network, and start all its containers once the others have run.

        Raises RuntimeError if one of those fails.
        """
        self.parts.push(self.volumes.in_memory)
        if self.node.host is not None:
            ports = [
                port for container in self.spec["containers"] for port in container.get("ports", ())
            ]
            name = f"{self.node.root.name}-{self.name}"
            self._sandbox = Sandbox(name, self.node.host, self.node.root / "cni", ports)
            self.parts.callback(self._sandbox.remove)
        for container in self.spec.get("initContainers", ()):
            running = self._start(container)
            if running.wait():
                raise RuntimeError(f"{container['name']} failed: {running.log()}")
        for container in self.spec["containers"]:
            self.containers[container["name"]] = self._start(container)

    def restart(self, name: str) -> None:
        """Start a container that has ended again, as the kubelet does."""
        (spec,) = (container for container in self.spec["containers"] if container["name"] == name)
        self.containers[name].delete()
        self.containers[name] = self._start(spec)

    @property
    def ip(self) -> str:
        return self.node.ip if self._sandbox is None else self._sandbox.address

    def _start(self, spec: Mapping[str, Any]) -> "Container":
        bundle = self._root / spec["name"]
        shutil.rmtree(bundle, ignore_errors=True)
        bundle.mkdir(parents=True)
        mounts = [*map(self._mount, spec["volumeMounts"]), *self._image.mounts()]
        root = self._image.lay_out(bundle / "rootfs")
        joined = None if self._sandbox is None else self._sandbox.network.path
        security = Security.of(self.spec, spec)
        env = self._environment(spec)
        config = runtime_config(root, self._args(spec, env), env, security, mounts, joined)
        (bundle / "config.json").write_text(json.dumps(config))
        name = f"{self._root.parent.name}-{self.name}-{spec['name']}"
        return self.parts.enter_context(Container(name, bundle, spec))

    def _args(self, spec: Mapping[str, Any], env: Mapping[str, str]) -> tuple[str, ...]:
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
        if reference.get("optional"):
            return self.node.objects.get(name, {})
        return self.node.objects[name]

    def _mount(self, mount: Mapping[str, Any]) -> Mount:
        propagation = {"HostToContainer": "rslave"}.get(
            mount.get("mountPropagation", ""), "rprivate"
        )
        return Mount(
            self.volumes[mount["name"]],
            mount["mountPath"],
            mount.get("readOnly", False),
            propagation,
        )


class Container(AbstractContextManager["Container"]):
    """A running container; it is deleted when the context that it opens is left."""

    def __init__(self, name: str, bundle: Path, spec: Mapping[str, Any]) -> None:
        self.name = name
        self.spec = spec
        self._log = bundle / "log"
        self._runtime = logged((*_RUNTIME, "run", "--bundle", bundle, name), self._log)

    def __repr__(self) -> str:
        return f"<Container {self.name}>"

    def __exit__(self, *_exc: object) -> None:
        self.delete()

    def delete(self) -> None:
        subprocess.run(
            (*_RUNTIME, "delete", "--force", self.name), capture_output=True, check=False
        )
        self._runtime.wait(_LIMIT_S)

    def exec(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            (*_RUNTIME, "exec", self.name, *command),
            capture_output=True,
            text=True,
            check=False,
            timeout=_LIMIT_S,
        )

    def probe(self, kind: str) -> bool:
        """Run a probe once, `startup`, `readiness` or `liveness`; tell whether it succeeded."""
        return self.exec(*self.spec[f"{kind}Probe"]["exec"]["command"]).returncode == 0

    def wait_until_started(self) -> None:
        """Repeat the startup probe until it succeeds. Raises RuntimeError if the container ends."""

        def started() -> bool:
            if self._runtime.poll() is not None:
                raise RuntimeError(f"{self.name} ended: {self.log()}")
            return self.probe("startup")

        eventually(started, limit_s=_LIMIT_S)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.state()["pid"], number)

    def state(self) -> Json:
        done = subprocess.run(
            (*_RUNTIME, "state", self.name), capture_output=True, text=True, check=True
        )
        state: Json = json.loads(done.stdout)
        return state

    def wait(self) -> int:
        """Wait until its process has ended; return the exit code."""
        return self._runtime.wait(_LIMIT_S)

    def log(self) -> str:
        return self._log.read_text(errors="replace")


def _expanded(text: str, env: Mapping[str, str]) -> str:
    for name, value in env.items():
        text = text.replace(f"$({name})", value)
    return text


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

    They have no capability and are under seccomp; they can write to a folder, and to nothing of
    their image.
    """
    done = container.exec("python", "-c", _PROGRAM, folder)
    lines = [line.split(":", 1) for line in done.stdout.splitlines() if ":" in line]
    found = {(name, " ".join(value.split())) for name, value in lines if name in (*_WANTED, "root")}
    assert found == set(_STRICT.items()), (found, done.stderr)
