"""Kustomize and Helm give the same objects, whichever parts are chosen, and the API takes them."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from shardcache.cluster.nginx_process import _STOP_LIMIT_S
from shardcache.shared.front import FRONT
from support.cluster.tier import OWNER_PORT
from support.platforms.rendered import INSTALL, KUBERNETES, LIMIT_S, by_kind, kustomized, objects_of
from support.programs.processes import printed_by

pytestmark = pytest.mark.skipif(
    not (shutil.which("helm") and shutil.which("kubectl")), reason=INSTALL
)
# Of monitoring.coreos.com/v1, of which the API knows nothing.
POD_MONITOR = """
jobLabel: app.kubernetes.io/name
selector:
  matchLabels: {app.kubernetes.io/instance: shardcache, app.kubernetes.io/name: shardcache}
podMetricsEndpoints:
- {port: metrics, path: /metrics, interval: 15s,
   authorization: {type: Bearer, credentials: {key: token, name: shardcache-metrics}},
   relabelings: [{sourceLabels: [__meta_kubernetes_pod_node_name], targetLabel: instance}]}
"""
CONTENT = re.compile(r"\b(shardcache-config)-[0-9a-z]{10}\b")
STORE = "https://s3.example.com"
TIER = ("tier.enabled=true", f"tier.store={STORE}")
CHOICES = {
    "as it comes": ((), ()),
    "metrics": (("metrics",), ("metrics.enabled=true",)),
    "prepared nodes": (("prepared-nodes",), ("makeFolders=false",)),
    "both": (("metrics", "prepared-nodes"), ("metrics.enabled=true", "makeFolders=false")),
    "a tier": (("tier",), TIER),
    "a tier and metrics": (("tier", "metrics"), (*TIER, "metrics.enabled=true")),
    "a tier on prepared nodes": (("tier", "prepared-nodes"), (*TIER, "makeFolders=false")),
    "all": (
        ("metrics", "tier", "prepared-nodes"),
        (*TIER, "metrics.enabled=true", "makeFolders=false"),
    ),
}


def templated(*sets: str) -> list[dict[str, Any]]:
    """Return the objects of the chart, with values such as `metrics.enabled=true`."""
    flags = [word for pair in sets for word in ("--set", pair)]
    command = ["helm", "template", "release", str(KUBERNETES / "chart"), *flags]
    return objects_of(printed_by(command, timeout=LIMIT_S))


def comparable(objects: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return them by kind and name, without differences that mean nothing to Kubernetes.

    That is the order of containers, volumes and mounts, and how the name of a ConfigMap is made
    from what it holds.
    """
    text = yaml.safe_dump_all(objects)
    found = {
        (thing["kind"], thing["metadata"]["name"]): thing
        for thing in objects_of(CONTENT.sub(r"\1-of-its-content", text))
    }
    assert len(found) == len(objects)
    spec = found["DaemonSet", "shardcache"]["spec"]["template"]["spec"]
    spec["volumes"].sort(key=name_of)
    spec["containers"].sort(key=name_of)
    for container in (*spec["containers"], *spec.get("initContainers", ())):
        container["volumeMounts"].sort(key=name_of)
    return found


def name_of(named: dict[str, Any]) -> str:
    return str(named["name"])


@pytest.fixture
def overlay(tmp_path: Path) -> Path:
    """A copy of the kustomizations, to which a test may add one; its tier has a store."""
    copy = Path(shutil.copytree(KUBERNETES, tmp_path / "kubernetes"))
    daemonset = copy / "components" / "tier" / "daemonset.yaml"
    daemonset.write_text(
        daemonset.read_text().replace(
            '{name: STORE, value: ""}', f"{{name: STORE, value: {STORE}}}"
        )
    )
    return copy


def with_components(kubernetes: Path, names: tuple[str, ...]) -> Path:
    """Write a kustomization of the base and components; return its folder."""
    folder = kubernetes / "chosen"
    folder.mkdir(exist_ok=True)
    components = [f"../components/{name}" for name in names]
    (folder / "kustomization.yaml").write_text(
        f"resources: [../base]\ncomponents: [{', '.join(components)}]\n"
    )
    return folder


@pytest.mark.parametrize("choice", CHOICES)
def test_helm_and_kustomize_render_the_same(overlay: Path, choice: str) -> None:
    """The chart's defaults are the base, and each value that chooses a part is a component."""
    names, values = CHOICES[choice]
    found = comparable(kustomized(with_components(overlay, names)))
    assert comparable(templated(*values)) == found
    for thing in found.values():
        if thing["kind"] == "PodMonitor":
            assert thing["spec"] == yaml.safe_load(POD_MONITOR)
        else:
            kubernetes_validate.validate(thing, kubernetes_validate.latest_version(), strict=True)


def test_another_config_is_another_template() -> None:
    """Pods are replaced when the config changes, as its name depends on its content."""
    daemonset, other = (
        by_kind(templated(*sets))["DaemonSet"] for sets in ((), ("config=capacity = 1",))
    )
    assert daemonset["spec"]["template"] != other["spec"]["template"]


def test_the_daemon_has_time_to_end() -> None:
    """Kubernetes kills no daemon that is still within its own time to stop."""
    spec = by_kind(templated())["DaemonSet"]["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] > _STOP_LIMIT_S


def test_a_second_daemon_shares_nothing() -> None:
    """Under another name no object, label or selector meets those of the first."""
    first = templated()
    second = templated("name=other", "hostPaths.run=/run/other", "hostPaths.cache=/other")
    assert not {thing["metadata"]["name"] for thing in first} & {
        thing["metadata"]["name"] for thing in second
    }
    selectors = [
        by_kind(objects)["DaemonSet"]["spec"]["selector"]["matchLabels"]
        for objects in (first, second)
    ]
    assert selectors[0] != selectors[1]
    volumes = by_kind(second)["DaemonSet"]["spec"]["template"]["spec"]["volumes"]
    assert [volume["hostPath"]["path"] for volume in volumes[:2]] == ["/run/other", "/other"]


def test_components_are_named_in_any_order_that_has_the_folders(overlay: Path) -> None:
    """Metrics and tier keep each other's rules; a tier after prepared-nodes is refused."""
    one, other = (
        comparable(kustomized(with_components(overlay, names)))
        for names in (("metrics", "tier"), ("tier", "metrics"))
    )
    assert one == other
    with pytest.raises(subprocess.CalledProcessError):
        kustomized(with_components(overlay, ("prepared-nodes", "tier")))


def test_the_tier_is_confined_as_the_daemon_is(overlay: Path) -> None:
    """The tier has no further right, user or volume; the NetworkPolicy admits its port.

    The daemon has the folder of its socket, which it may not change.
    """
    found = comparable(kustomized(with_components(overlay, ("tier",))))
    spec = found["DaemonSet", "shardcache"]["spec"]["template"]["spec"]
    daemon, tier = spec["containers"]
    assert tier["securityContext"] == daemon["securityContext"]
    policy = found["NetworkPolicy", "shardcache-tier"]["spec"]
    ports = {rule["ports"][0]["port"] for rule in (*policy["ingress"], *policy["egress"])}
    assert (
        ports
        == {tier["ports"][0]["containerPort"]}
        == {tier["ports"][0]["hostPort"]}
        == {OWNER_PORT}
    )
    assert not spec.get("hostNetwork")
    assert tier["livenessProbe"]["exec"]["command"][-1] == "shardcache.cluster.nginx_probe"
    (mounted,) = (mount for mount in daemon["volumeMounts"] if mount["name"] == "tier-run")
    assert mounted["mountPath"] == str(Path(FRONT).parent)
    assert mounted["readOnly"] is True


def test_tier_has_its_own_store_and_port() -> None:
    """The chart renders none without a store, and another port wherever it stands."""
    with pytest.raises(subprocess.CalledProcessError):
        templated("tier.enabled=true")
    found = {
        thing["metadata"]["name"]: thing
        for thing in templated(*TIER, "tier.port=9181", "tier.extraArgs={--workers=8}")
    }
    (tier,) = (
        container
        for thing in found.values()
        if thing["kind"] == "DaemonSet"
        for container in thing["spec"]["template"]["spec"]["containers"]
        if container["name"] == "tier"
    )
    assert tier["args"][-2:] == ["--owner-port=9181", "--workers=8"]
    assert tier["ports"] == [
        {"name": "tier", "containerPort": 9181, "hostPort": 9181, "protocol": "TCP"}
    ]
    assert found["shardcache-tier"]["spec"]["ingress"] == [
        {"ports": [{"protocol": "TCP", "port": 9181}]}
    ]


def test_unused_tier_is_reported() -> None:
    """The notes after an installation say what the config lacks, if anything."""
    chart = KUBERNETES / "chart"
    example = KUBERNETES / "examples" / "tier" / "shardcache.toml"
    install = [
        "helm",
        "install",
        "shardcache",
        str(chart),
        "--dry-run=client",
        "--set",
        ",".join(TIER),
    ]
    unused, used = (
        subprocess.run(
            [*install, *more], check=True, capture_output=True, text=True
        ).stdout.partition("NOTES:")[2]
        for more in ((), ("--set-file", f"config={example}"))
    )
    assert "No daemon uses it yet" in unused
    assert "shardcache-tier-nodes" in used
    assert "No daemon uses it yet" not in used


def test_the_command_of_the_page_installs_a_tier_that_is_used() -> None:
    """`helm install` of docs/cluster.md gives the tier its store, and the daemon its front."""
    root = KUBERNETES.parents[1]
    (line,) = re.findall(
        r"^helm install (.*)$", (root / "docs" / "cluster.md").read_text(), re.MULTILINE
    )
    command = ["helm", "template", *shlex.split(line)]
    done = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    found = {thing["kind"]: thing for thing in objects_of(done.stdout)}
    assert f'tier = "{FRONT}"' in found["ConfigMap"]["data"]["shardcache.toml"]
    spec = found["DaemonSet"]["spec"]["template"]["spec"]
    (tier,) = (container for container in spec["containers"] if container["name"] == "tier")
    assert {"name": "STORE", "value": "https://s3.eu-central-1.amazonaws.com"} in tier["env"]
    folders = {volume["hostPath"]["path"] for volume in spec["volumes"] if "hostPath" in volume}
    assert "/mnt/nvme/shardcache-tier" in folders


def test_the_chart_is_well_formed() -> None:
    """`helm lint --strict` has nothing to say, and a value that does not exist is refused."""
    chart = str(KUBERNETES / "chart")
    subprocess.run(["helm", "lint", "--strict", "--quiet", chart], check=True, capture_output=True)
    misspelt = subprocess.run(
        ["helm", "template", chart, "--set", "makeFolder=false"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert misspelt.returncode != 0
    assert "makeFolder" in misspelt.stderr
