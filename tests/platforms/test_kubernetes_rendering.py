"""Kustomize and Helm give the same objects, whichever parts are chosen, and the API takes them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from shardcache.daemon import _STOP_LIMIT_S
from support.rendered import INSTALL, KUBERNETES, by_kind, comparable, kustomized, templated

pytestmark = pytest.mark.skipif(not (shutil.which("helm") and shutil.which("kubectl")), reason=INSTALL)
NAME = {"type": "string", "minLength": 1}
# Of monitoring.coreos.com/v1, the fields that are used here, and no other.
POD_MONITOR: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["selector", "podMetricsEndpoints"],
    "properties": {
        "jobLabel": {"const": "app.kubernetes.io/name"},
        "selector": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"matchLabels": {"type": "object", "additionalProperties": NAME}},
        },
        "podMetricsEndpoints": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "port": NAME,
                    "path": {"type": "string", "pattern": "^/"},
                    "interval": {"type": "string", "pattern": "^[0-9]+s$"},
                    "authorization": {
                        "type": "object",
                        "additionalProperties": False,
                        "properties": {
                            "type": {"const": "Bearer"},
                            "credentials": {
                                "type": "object",
                                "additionalProperties": False,
                                "required": ["key", "name"],
                                "properties": {"key": NAME, "name": NAME},
                            },
                        },
                    },
                    "relabelings": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "additionalProperties": False,
                            "properties": {"sourceLabels": {"type": "array", "items": NAME}, "targetLabel": NAME},
                        },
                    },
                },
            },
        },
    },
}
CHOICES = {
    "as it comes": ((), ()),
    "metrics": (("metrics",), ("metrics.enabled=true",)),
    "prepared nodes": (("prepared-nodes",), ("makeFolders=false",)),
    "both": (("metrics", "prepared-nodes"), ("metrics.enabled=true", "makeFolders=false")),
}


@pytest.fixture
def overlay(tmp_path: Path) -> Path:
    """A copy of the kustomizations, to which a test may add one."""
    return Path(shutil.copytree(KUBERNETES, tmp_path / "kubernetes"))


def with_components(kubernetes: Path, names: tuple[str, ...]) -> Path:
    """Write a kustomization of the base and components; return its folder."""
    folder = kubernetes / "chosen"
    folder.mkdir()
    components = [f"../components/{name}" for name in names]
    (folder / "kustomization.yaml").write_text(f"resources: [../base]\ncomponents: [{', '.join(components)}]\n")
    return folder


@pytest.mark.parametrize("choice", CHOICES)
def test_both_render_the_same(overlay: Path, choice: str) -> None:
    """The chart's default values are the base, and each value that chooses a part is a component."""
    names, values = CHOICES[choice]
    found = comparable(kustomized(with_components(overlay, names)))
    assert comparable(templated(*values)) == found
    for thing in found.values():
        if thing["kind"] == "PodMonitor":
            jsonschema.validate(thing["spec"], POD_MONITOR)
        else:
            kubernetes_validate.validate(thing, kubernetes_validate.latest_version(), strict=True)


def test_another_config_is_another_template() -> None:
    """Pods are replaced when the config changes: its name, which the template has, is made from what it holds."""
    daemonset, other = (by_kind(templated(*sets))["DaemonSet"] for sets in ((), ("config=capacity = 1",)))
    assert daemonset["spec"]["template"] != other["spec"]["template"]


def test_the_daemon_has_time_to_end() -> None:
    """Kubernetes kills no daemon that is still within its own time to stop."""
    spec = by_kind(templated())["DaemonSet"]["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] > _STOP_LIMIT_S


def test_a_second_daemon_shares_nothing() -> None:
    """Under another name no object, label or selector meets those of the first."""
    first, second = templated(), templated("name=other", "hostPaths.run=/run/other", "hostPaths.cache=/other")
    assert not {thing["metadata"]["name"] for thing in first} & {thing["metadata"]["name"] for thing in second}
    selectors = [by_kind(objects)["DaemonSet"]["spec"]["selector"]["matchLabels"] for objects in (first, second)]
    assert selectors[0] != selectors[1]
    volumes = by_kind(second)["DaemonSet"]["spec"]["template"]["spec"]["volumes"]
    assert [volume["hostPath"]["path"] for volume in volumes[:2]] == ["/run/other", "/other"]


def test_the_chart_is_well_formed() -> None:
    """`helm lint --strict` has nothing to say, and a value that does not exist is refused."""
    chart = str(KUBERNETES / "chart")
    subprocess.run(["helm", "lint", "--strict", "--quiet", chart], check=True, capture_output=True)
    misspelt = subprocess.run(
        ["helm", "template", chart, "--set", "makeFolder=false"], check=False, capture_output=True, text=True
    )
    assert misspelt.returncode != 0 and "makeFolder" in misspelt.stderr
