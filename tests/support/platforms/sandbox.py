"""A pod's network: a namespace that CNI's own plugins connect to its node, as a container runtime has it done."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.cluster.network import Host, Namespace
from support.platforms.oci import Json

PLUGINS = Path("/usr/lib/cni")
INSTALL = "needs CNI's plugins and iptables: apt-get install containernetworking-plugins iptables"
_KINDS = ("bridge", "portmap")


class Sandbox:
    """Network of one pod. `address`: the pod's, which only its node can reach."""

    def __init__(self, name: str, node: Host, folder: Path, ports: Sequence[Mapping[str, Any]]) -> None:
        """Connect it to a node.

        Args:
            folder: of the plugins' files on this node.
            ports: of the pod's containers; those with a `hostPort` are published at the node's address.
        """
        self._name, self._node = name, node
        self.network = Namespace()  # the namespace, by which containers join it
        with node.entered():
            Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        number = node.address.rpartition(".")[2]
        pool = {"type": "host-local", "dataDir": str(folder), "ranges": [[{"subnet": f"10.88.{number}.0/24"}]]}
        self._bridge: Json = {"type": "bridge", "bridge": "cni0", "isGateway": True, "ipMasq": True}
        self._bridge |= {"hairpinMode": True, "ipam": {**pool, "routes": [{"dst": "0.0.0.0/0"}]}}
        self._result = self._plugin("ADD", self._bridge)
        self.address = str(self._result["ips"][0]["address"].partition("/")[0])
        mapped = [
            {"hostPort": port["hostPort"], "containerPort": port["containerPort"], "protocol": port["protocol"].lower()}
            for port in ports
            if "hostPort" in port
        ]
        self._portmap: Json = {"type": "portmap", "snat": True, "capabilities": {"portMappings": True}}
        self._portmap |= {"runtimeConfig": {"portMappings": mapped}, "prevResult": self._result}
        self._plugin("ADD", self._portmap)

    def remove(self) -> None:
        """Disconnect it; the address is free again."""
        self._plugin("DEL", self._portmap)
        self._plugin("DEL", self._bridge)
        self.network.close()

    def _plugin(self, command: str, config: Json) -> Any:
        variables = {"COMMAND": command, "CONTAINERID": self._name, "NETNS": str(self.network.path)}
        variables |= {"IFNAME": "eth0", "PATH": str(PLUGINS)}
        env = {"PATH": os.environ["PATH"], **{f"CNI_{name}": value for name, value in variables.items()}}
        with self._node.entered():
            done = subprocess.run(
                [PLUGINS / config["type"]],
                input=json.dumps({"cniVersion": "0.4.0", "name": "pods", **config}),
                env=env,
                capture_output=True,
                text=True,
                check=False,
            )
        if done.returncode:
            raise RuntimeError(f"CNI's plugin {config['type']} failed: {done.stdout}{done.stderr}")
        return json.loads(done.stdout) if done.stdout else None


def why_not() -> str | None:
    """Return why no pod can have a network of its own here, or None."""
    return None if all((PLUGINS / kind).exists() for kind in _KINDS) else INSTALL
