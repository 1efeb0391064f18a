"""The image's recipe: clean by its linter, small, and not root's."""

import re
import subprocess
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_linter_has_nothing_to_say() -> None:
    """hadolint finds no bad habit in the Dockerfile."""
    hadolint = Path(sysconfig.get_path("scripts")) / "hadolint"
    done = subprocess.run([hadolint, "--no-color", ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_copied_files_are_sent_to_the_build() -> None:
    """Files that the Dockerfile copies from the project exist, and are not left out by .dockerignore."""
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    lines = [line.split()[1:] for line in (ROOT / "Dockerfile").read_text().splitlines() if line.startswith("COPY")]
    copied = {name for line in lines if not line[0].startswith("--from") for name in line[:-1]}
    assert copied == sent and all((ROOT / name).exists() for name in copied)


def test_the_image_has_no_web_server_without_a_target() -> None:
    """The last stage is the daemon's; only that of the tier installs packages of the distribution."""
    stages = re.split(r"^FROM .* AS ", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]
    names = [stage.split()[0] for stage in stages]
    assert names[-1] == "daemon"
    assert [name for name, stage in zip(names, stages, strict=True) if "apt-get" in stage] == ["tier"]
