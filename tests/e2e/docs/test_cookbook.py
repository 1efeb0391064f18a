"""The projects of the cookbook run as their READMEs show, in a copy of their folder."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from support import ROOT
from support.programs.cli import clean_environment
from support.programs.daemon import Daemon
from support.programs.pages import Place

COOKBOOK = ROOT / "docs" / "cookbook"
PROJECTS = sorted(path.parent.name for path in COOKBOOK.glob("*/README.md"))
MAX_SCRIPT_LINES = 120


@pytest.fixture(scope="module")
def kitchen() -> Iterator[Daemon]:
    """The daemon that serves all projects."""
    with (
        tempfile.TemporaryDirectory(prefix="shardcache-cookbook-") as root,
        Daemon(Path(root)) as daemon,
    ):
        yield daemon


@pytest.mark.slow
@pytest.mark.parametrize("project", PROJECTS)
def test_a_project_runs_as_its_readme_shows(kitchen: Daemon, tmp_path: Path, project: str) -> None:
    """All commands in order, and what they print."""
    folder = tmp_path / project
    shutil.copytree(COOKBOOK / project, folder)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = clean_environment({"PATH": path, "SHARDCACHE_SOCKET": str(kitchen.socket)})
    Place(folder, env).follow((folder / "README.md").read_text())


@pytest.mark.parametrize("project", PROJECTS)
def test_a_project_is_short_and_listed(project: str) -> None:
    """Each script fits on two screens, and the page of all projects names it."""
    for script in (COOKBOOK / project).glob("*.py"):
        assert len(script.read_text().splitlines()) <= MAX_SCRIPT_LINES, script
    assert f"({project}/README.md)" in (COOKBOOK / "index.md").read_text()


def test_the_kubernetes_job_mounts_what_the_daemonset_has() -> None:
    """Its volumes are the folders of the node's daemon, at the same paths."""
    job, service = yaml.safe_load_all((COOKBOOK / "kubernetes" / "job.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    mounted = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    on_node = {
        volume["name"]: volume["hostPath"]["path"]
        for volume in pod["volumes"]
        if "hostPath" in volume
    }
    assert {name: mounted[name] for name in on_node} == on_node
    daemonset = "".join(
        path.read_text() for path in (ROOT / "deploy" / "kubernetes").rglob("*.yaml")
    )
    for path in on_node.values():
        assert path in daemonset
    assert service["spec"]["selector"] == job["spec"]["template"]["metadata"]["labels"]
