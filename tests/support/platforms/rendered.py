"""The Kubernetes manifests as `kubectl kustomize` and `helm template` render them."""

import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

Json = dict[str, Any]

KUBERNETES = Path(__file__).parents[3] / "deploy" / "kubernetes"
INSTALL = "needs helm and kubectl: https://helm.sh/docs/intro/install and https://kubernetes.io/docs/tasks/tools"
_LIMIT_S = 120
_CONTENT = re.compile(r"\b(shardcache-config)-[0-9a-z]{10}\b")


def kustomized(folder: Path) -> list[Json]:
    return objects_of(_run("kubectl", "kustomize", str(folder)))


def templated(*sets: str) -> list[Json]:
    """Return the objects of the chart, with values such as `metrics.enabled=true`."""
    flags = [word for pair in sets for word in ("--set", pair)]
    return objects_of(_run("helm", "template", "release", str(KUBERNETES / "chart"), *flags))


def objects_of(text: str) -> list[Json]:
    return [document for document in yaml.safe_load_all(text) if document]


def by_kind(objects: list[Json]) -> dict[str, Json]:
    """Return them by their kinds, but for a tier's own NetworkPolicy; each kind is there once."""
    found = [thing for thing in objects if not thing["metadata"]["name"].endswith("-tier")]
    kinds = {thing["kind"]: thing for thing in found}
    assert len(kinds) == len(found), [thing["kind"] for thing in objects]
    return kinds


def comparable(objects: list[Json]) -> dict[tuple[str, str], Json]:
    """Return them by kind and name, without what two renderers do differently and Kubernetes takes for the same.

    That is the order of containers, volumes and mounts, and how the name of a ConfigMap is made from what it holds.
    """
    text = yaml.safe_dump_all(objects)
    found = {
        (thing["kind"], thing["metadata"]["name"]): thing
        for thing in objects_of(_CONTENT.sub(r"\1-of-its-content", text))
    }
    assert len(found) == len(objects)
    spec = found["DaemonSet", "shardcache"]["spec"]["template"]["spec"]
    spec["volumes"].sort(key=_name)
    spec["containers"].sort(key=_name)
    for container in (*spec["containers"], *spec.get("initContainers", ())):
        container["volumeMounts"].sort(key=_name)
    return found


def _name(named: Json) -> str:
    return str(named["name"])


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=_LIMIT_S).stdout
