"""The Kubernetes manifests against the schemas of Kubernetes' own API."""

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from support.platforms.rendered import KUBERNETES, objects_of

VERSIONS = ("1.28", kubernetes_validate.latest_version())
FOLDERS = ("base", "components/tier", "examples/site", "examples/tier", "examples/training")


def resources(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return names and objects of a kustomization's own files, but not its patches."""
    listed = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    files = [folder / name for name in listed if name.endswith(".yaml")]
    return [
        (str(file.relative_to(KUBERNETES)), thing)
        for file in files
        for thing in objects_of(file.read_text())
    ]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("folder", FOLDERS)
def test_each_object_is_as_the_api_has_it(folder: str, version: str) -> None:
    """No object lacks a field or has an unknown one, in old and new Kubernetes."""
    found = resources(KUBERNETES / folder)
    assert found
    for name, thing in found:
        try:
            kubernetes_validate.validate(thing, version, strict=True)
        except kubernetes_validate.ValidationError as exn:
            pytest.fail(f"{name}: {'.'.join(map(str, exn.path))}: {exn.message}")
