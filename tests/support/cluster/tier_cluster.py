"""Kubernetes nodes with a tier and a store: pods of `deploy/kubernetes/examples/tier`."""

import base64
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from support.cluster.network import Network
from support.cluster.node import Dataset, Store, sha256
from support.network.http_requests import Request
from support.network.scripted_server import Reply, ScriptedServer, answer
from support.platforms.images import Image
from support.platforms.pods import Node, Pod
from support.platforms.rendered import KUBERNETES, by_kind, kustomized
from support.programs.pages import blocks, section
from support.programs.processes import printed_by
from support.stores.seaweedfs import REGION

_NODES = {
    "name": "nodes",
    "singularName": "node",
    "namespaced": False,
    "kind": "Node",
    "verbs": ["get", "list"],
}


@contextmanager
def serving(nodes: Sequence[Mapping[str, Any]], folder: Path) -> Iterator[dict[str, str]]:
    """Serve nodes; yield the environment in which kubectl asks this server.

    Args:
        nodes: as the API has them.
        folder: for kubectl's config and its cache.
    """

    with _Api(nodes) as server:
        cluster = {"name": "here", "cluster": {"server": f"http://127.0.0.1:{server.port}"}}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [cluster],
            "current-context": "here",
        }
        config |= {"contexts": [{"name": "here", "context": {"cluster": "here", "user": ""}}]}
        (folder / "kubeconfig").write_text(json.dumps(config))
        yield {"KUBECONFIG": str(folder / "kubeconfig"), "HOME": str(folder)}


class _Api(ScriptedServer):
    """Answers requests for the list of nodes, and for what the server has."""

    def __init__(self, nodes: Sequence[Mapping[str, Any]]) -> None:
        super().__init__()
        self._nodes = nodes

    def reply(self, head: str, _number: int) -> Reply:
        url = urlsplit(Request.parse(head).target)
        found: dict[str, Any]
        match url.path:
            case "/api":
                found = {"kind": "APIVersions", "versions": ["v1"]}
            case "/apis":
                found = {"kind": "APIGroupList", "apiVersion": "v1", "groups": []}
            case "/api/v1":
                found = {"kind": "APIResourceList", "groupVersion": "v1", "resources": [_NODES]}
            case "/api/v1/nodes":
                found = {
                    "kind": "NodeList",
                    "apiVersion": "v1",
                    "metadata": {},
                    "items": self._chosen(url.query),
                }
            case _:
                return Reply(answer(b"", status="404 Not Found"))
        return Reply(
            answer(json.dumps(found).encode(), "Content-Type: application/json", status="200 OK")
        )

    def _chosen(self, query: str) -> list[Mapping[str, Any]]:
        name, _, value = parse_qs(query).get("labelSelector", ["="])[0].partition("=")
        return [
            node
            for node in self._nodes
            if not name or node["metadata"]["labels"].get(name) == value
        ]


BUCKET = "training-data"
NODES = "shardcache-tier-nodes"
SECRET = "shardcache-tier"
DISK = "/mnt/nvme"
_GPU = "nvidia.com/gpu.present"


class TierCluster:
    """The nodes `gpu-1`, `gpu-2`, …, and a store with its own address.

    Attributes:
        store: the object store, whose sent bytes are counted.
        nodes: all nodes.
        objects: the cluster's ConfigMaps and Secrets, by name.
    """

    def __init__(
        self,
        root: Path,
        network: Network,
        store: Store,
        count: int,
        image: Image,
        env: Mapping[str, str],
    ) -> None:
        """Make the nodes, whose pods run on an image with its own environment."""
        self._root = root
        self.store = store
        self._image = image
        self._env = env
        self._objects = kustomized(KUBERNETES / "examples" / "tier")
        (config,) = (thing for thing in self._objects if thing["kind"] == "ConfigMap")
        self.objects: dict[str, dict[str, str]] = {"shardcache-credentials": store.env()}
        # The example's disk is larger than this machine's, and its store elsewhere.
        text = config["data"]["shardcache.toml"]
        for theirs, ours in (('"1TB"', '"1GB"'), ('"5%"', '"0%"'), ("eu-central-1", REGION)):
            assert theirs in text
            text = text.replace(theirs, ours)
        self.objects[config["metadata"]["name"]] = {"shardcache.toml": text}
        self.nodes = [
            Node(root / f"gpu-{number}", "", self.objects, network.add(number))
            for number in range(1, count + 1)
        ]

    def pod(self, node: Node, name: str = "shardcache") -> Pod:
        """Return the DaemonSet's pod on a node, not started yet."""
        spec = deepcopy(by_kind(self._objects)["DaemonSet"]["spec"]["template"]["spec"])
        for container in spec["containers"]:
            if container["name"] == "tier":
                (store,) = (
                    variable for variable in container["env"] if variable["name"] == "STORE"
                )
                store["value"] = self.store.endpoint_url
                container["args"] = [*container["args"], "--min-free=1MiB"]
        return Pod(name, spec, node, self._image, self._env)

    def list_nodes(self, nodes: Sequence[Node]) -> None:
        """Write the ConfigMap with the list of nodes, by the commands of the page."""
        listed = [
            _as_object(node.name, True, node.host.address)
            for node in nodes
            if node.host is not None
        ]
        listed.append(_as_object("cpu-1", False, "10.77.0.99"))
        with serving(listed, self._root) as env:
            for line in _commands("get nodes", "create configmap"):
                self._apply(self._run(line, env))

    def certify(self) -> None:
        """Write the Secret with a new certificate, by the commands of the page."""
        for line in _commands("cluster certificates", "create secret"):
            self._apply(self._run(line, {}))

    def _run(self, command: str, env: dict[str, str]) -> str:
        variables = {**os.environ, "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}", **env}
        return printed_by(command, shell=True, cwd=self._root, env=variables)

    def _apply(self, text: str) -> None:
        match yaml.safe_load(text):
            case {"kind": "ConfigMap", "metadata": {"name": name}, "data": data}:
                self.objects[name] = data
            case {"kind": "Secret", "metadata": {"name": name}, "data": data}:
                self.objects[name] = {
                    key: base64.b64decode(value).decode() for key, value in data.items()
                }


def fetch(pods: Sequence[Pod], dataset: Dataset) -> None:
    """Fetch a dataset on all nodes at once. Raises AssertionError if any byte is missing."""
    with ThreadPoolExecutor(len(pods)) as pool:
        done = list(
            pool.map(
                lambda pod: pod.containers["shardcache"].exec("shardcache", "warm", *dataset.urls),
                pods,
            )
        )
    for pod, each in zip(pods, done, strict=True):
        assert each.returncode == 0, (
            f"{pod}: {each.stdout}{each.stderr}{pod.containers['shardcache'].log()}"
        )
        cached = pod.node.path(f"{DISK}/shardcache/shards").rglob("*.tar")
        assert not dataset.checksums - set(map(sha256, cached)), pod


def evict(pods: Sequence[Pod]) -> None:
    for pod in pods:
        done = pod.containers["shardcache"].exec("shardcache", "evict", "s3://**")
        assert done.returncode == 0, done.stdout + done.stderr


def tier_status(pod: Pod) -> Any:
    """Return the state of all nodes, by the command of the page in the pod's tier."""
    (line,) = _commands("cluster status")
    command = line.partition(" -- ")[2].split()
    return json.loads(pod.containers["tier"].exec(*command, "--json").stdout)


def _commands(*parts: str) -> list[str]:
    """Return the page's lines with one of these parts, without their `kubectl apply`."""
    page = section("docs/cluster.md", "On Kubernetes")
    lines = [line for block in blocks(page, "sh") for line in block.body.splitlines()]
    found = [
        line.removesuffix(" | kubectl apply -f -")
        for line in lines
        if any(part in line for part in parts)
    ]
    assert len(found) == len(parts), found
    return found


def _as_object(name: str, has_gpu: bool, address: str) -> dict[str, Any]:
    kinds = (("Hostname", name), ("InternalIP", address), ("InternalIP", "fd00::1"))
    labels = {_GPU: "true"} if has_gpu else {}
    addresses = [{"type": kind, "address": value} for kind, value in kinds]
    return {"metadata": {"name": name, "labels": labels}, "status": {"addresses": addresses}}
