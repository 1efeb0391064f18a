"""The Kubernetes manifests as `kubectl kustomize` and `helm template` render them."""

from pathlib import Path
from typing import Any

import yaml

from support import ROOT
from support.programs.processes import printed_by

Json = dict[str, Any]

KUBERNETES = ROOT / "deploy" / "kubernetes"
INSTALL = (
    "needs helm and kubectl: "
    "https://helm.sh/docs/intro/install and https://kubernetes.io/docs/tasks/tools"
)
LIMIT_S = 120


def kustomized(folder: Path) -> list[Json]:
    return objects_of(printed_by(["kubectl", "kustomize", str(folder)], timeout=LIMIT_S))


def objects_of(text: str) -> list[Json]:
    return [document for document in yaml.safe_load_all(text) if document]


def by_kind(objects: list[Json]) -> dict[str, Json]:
    """Return them by their kinds, but for a tier's own NetworkPolicy; each kind is there once."""
    found = [thing for thing in objects if not thing["metadata"]["name"].endswith("-tier")]
    kinds = {thing["kind"]: thing for thing in found}
    assert len(kinds) == len(found), [thing["kind"] for thing in objects]
    return kinds
