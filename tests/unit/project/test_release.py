"""The release: a valid workflow, one version everywhere, and a clean image recipe."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardcache import __version__
from support import ROOT

WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"


def run_step(name: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the shell commands of a step of the workflow, in a folder, as GitHub does."""
    jobs: dict[str, Any] = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    (script,) = [
        step["run"]
        for job in jobs.values()
        for step in job["steps"]
        if step.get("name", "").startswith(name)
    ]
    given = {
        **os.environ,
        "GITHUB_SERVER_URL": "https://github.com",
        "GITHUB_REPOSITORY": "o/shardcache",
        **env,
    }
    command = ["bash", "-e", "-o", "pipefail", "-c", script]
    return subprocess.run(
        command, cwd=folder, env=given, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_github_takes_the_workflow_and_the_forms_of_issues() -> None:
    """They have the form that GitHub's schemas demand."""
    forms = (ROOT / ".github" / "ISSUE_TEMPLATE").iterdir()
    for schema, files in (("github-workflows", [WORKFLOW]), ("github-issue-forms", forms)):
        command = [
            sys.executable,
            "-m",
            "check_jsonschema",
            "--builtin-schema",
            f"vendor.{schema}",
            *files,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("tag", "section", "complaint"),
    [
        (f"v{__version__}", __version__, ""),
        ("v9.9.9", __version__, "the tag is v9.9.9"),
        (f"v{__version__}", "9.9.9", "CHANGELOG.md has no section"),
    ],
)
def test_a_tag_is_released_only_as_the_version_that_it_names(
    tmp_path: Path, tag: str, section: str, complaint: str
) -> None:
    """A tag without the code's version or a changelog section ends the workflow."""
    (tmp_path / "shardcache").mkdir()
    shutil.copy(ROOT / "shardcache" / "__init__.py", tmp_path / "shardcache")
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## [{section}] - 2026-01-01\n")
    done = run_step("Compare the tag", tmp_path, GITHUB_REF_NAME=tag)
    assert (done.returncode == 0) == (complaint == ""), done.stderr
    assert complaint in done.stderr


def test_one_version_is_written_everywhere() -> None:
    """Image, chart and kustomizations name the version of the code."""
    written = {
        "CITATION.cff": r"^version: (.+)$",
        "Dockerfile": r"^ARG VERSION=(.+)$",
        "deploy/kubernetes/chart/Chart.yaml": r"^(?:version|appVersion): (.+)$",
        "deploy/kubernetes/base/kustomization.yaml": r"newTag: (.+)$",
        "deploy/kubernetes/components/tier/kustomization.yaml": r"newTag: (.+)$",
        "deploy/kubernetes/examples/site/kustomization.yaml": r"newTag: (.+)$",
        "deploy/kubernetes/examples/tier/kustomization.yaml": r"newTag: (.+)$",
    }
    for file, pattern in written.items():
        assert set(re.findall(pattern, (ROOT / file).read_text(), re.MULTILINE)) == {__version__}, (
            file
        )


# The Dockerfile


def test_the_linter_of_dockerfiles_has_nothing_to_say() -> None:
    """hadolint finds no bad habit in the Dockerfile."""
    hadolint = Path(sysconfig.get_path("scripts")) / "hadolint"
    done = subprocess.run(
        [hadolint, "--no-color", ROOT / "Dockerfile"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_copied_files_are_sent_to_the_build() -> None:
    """Files that the Dockerfile copies exist and are not left out by .dockerignore."""
    sent = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    lines = [
        line.split()[1:]
        for line in (ROOT / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY")
    ]
    copied = {name for line in lines if not line[0].startswith("--from") for name in line[:-1]}
    assert copied == sent
    assert all((ROOT / name).exists() for name in copied)


def test_the_image_has_no_web_server_without_a_target() -> None:
    """The last stage is the daemon's; only the tier's installs distribution packages."""
    stages = re.split(r"^FROM .* AS ", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]
    names = [stage.split()[0] for stage in stages]
    assert names[-1] == "daemon"
    assert [name for name, stage in zip(names, stages, strict=True) if "apt-get" in stage] == [
        "tier"
    ]
