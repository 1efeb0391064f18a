"""The Kubernetes manifests as `kubectl kustomize` and `helm template` render them."""

import subprocess
from pathlib import Path
from typing import Any

import yaml

from support import ROOT

Json = dict[str, Any]

KUBERNETES = ROOT / "deploy" / "kubernetes"
INSTALL = "needs helm and kubectl: https://helm.sh/docs/intro/install and https://kubernetes.io/docs/tasks/tools"
_LIMIT_S = 120


def kustomized(folder: Path) -> list[Json]:
    return objects_of(rendered_by("kubectl", "kustomize", str(folder)))


def objects_of(text: str) -> list[Json]:
    return [document for document in yaml.safe_load_all(text) if document]


def by_kind(objects: list[Json]) -> dict[str, Json]:
    """Return them by their kinds, but for a tier's own NetworkPolicy; each kind is there once."""
    found = [thing for thing in objects if not thing["metadata"]["name"].endswith("-tier")]
    kinds = {thing["kind"]: thing for thing in found}
    assert len(kinds) == len(found), [thing["kind"] for thing in objects]
    return kinds


def rendered_by(*command: str) -> str:
    """Run a renderer; return what it printed."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=_LIMIT_S).stdout
