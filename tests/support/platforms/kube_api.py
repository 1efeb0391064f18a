"""As much of Kubernetes' API as `kubectl get nodes` asks for."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

_NODES = {"name": "nodes", "singularName": "node", "namespaced": False, "kind": "Node", "verbs": ["get", "list"]}


@contextmanager
def serving(nodes: Sequence[Mapping[str, Any]], folder: Path) -> Iterator[dict[str, str]]:
    """Serve nodes; yield the environment in which kubectl asks this server.

    Args:
        nodes: as the API has them.
        folder: for kubectl's config and its cache.
    """

    class Api(_Api):
        listed = nodes

    with ThreadingHTTPServer(("127.0.0.1", 0), Api) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        cluster = {"name": "here", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
        config = {"apiVersion": "v1", "kind": "Config", "clusters": [cluster], "current-context": "here"}
        config |= {"contexts": [{"name": "here", "context": {"cluster": "here", "user": ""}}]}
        (folder / "kubeconfig").write_text(json.dumps(config))
        try:
            yield {"KUBECONFIG": str(folder / "kubeconfig"), "HOME": str(folder)}
        finally:
            server.shutdown()
            thread.join()


class _Api(BaseHTTPRequestHandler):
    listed: ClassVar[Sequence[Mapping[str, Any]]] = ()

    def do_GET(self) -> None:
        """Answer a request for the list of nodes, or for what the server has."""
        url = urlsplit(self.path)
        match url.path:
            case "/api":
                self._send({"kind": "APIVersions", "versions": ["v1"]})
            case "/apis":
                self._send({"kind": "APIGroupList", "apiVersion": "v1", "groups": []})
            case "/api/v1":
                self._send({"kind": "APIResourceList", "groupVersion": "v1", "resources": [_NODES]})
            case "/api/v1/nodes":
                self._send({"kind": "NodeList", "apiVersion": "v1", "metadata": {}, "items": self._chosen(url.query)})
            case _:
                self.send_error(404)

    def _chosen(self, query: str) -> list[Mapping[str, Any]]:
        name, _, value = parse_qs(query).get("labelSelector", ["="])[0].partition("=")
        return [node for node in self.listed if not name or node["metadata"]["labels"].get(name) == value]

    def _send(self, answer: Mapping[str, Any]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Log nothing."""
