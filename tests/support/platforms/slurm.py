"""A Slurm cluster of two nodes on this machine, from the packages slurm-wlm and munge.

Everything lies below one folder, and nothing of the system's own Slurm is touched. Each node's
daemon has a mount namespace of its own, in which one path shows another folder: that is the node's
own disk.
"""

import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from support import ROOT
from support.disks.mounts import may_mount
from support.lifetime import Lifetime
from support.network.ports import free_port
from support.programs.cli import clean_environment
from support.programs.daemon import eventually
from support.programs.processes import logged, printed_by

NODES = ("n1", "n2")
_SCRIPTS = ROOT / "deploy" / "slurm"
_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun")
_START_LIMIT_S = 120.0
_COMMAND_LIMIT_S = 120.0
JOB_LIMIT_S = 300.0
PAUSE_S = 0.2  # between two questions to the controller, each of which is a process
_ON_ITS_DISK = 'mount --bind "$0" "$1" && shift && exec "$@"'


def why_not() -> str | None:
    """Return why no cluster can be started here, None where one can."""
    if missing := [name for name in _PROGRAMS if shutil.which(name) is None]:
        return f"no {', '.join(missing)}: apt-get install slurm-wlm munge"
    return None if may_mount() else "takes root and the right to mount"


_SITE = """
socket={disk}/s.sock
job_folder={disk}/shardcache-$SLURM_JOB_ID
tell() {{
    echo "$SLURM_JOB_ID: $*" >>{disk}/told
}}
"""


@contextmanager
def deployed(site: str) -> Iterator["Slurm"]:
    """Run a cluster with the scripts of deploy/slurm and the edits that a site makes.

    Args:
        site: more of that, in which `{disk}` is a node's own disk.
    """
    with tempfile.TemporaryDirectory(prefix="slurm-") as name:
        root = Path(name)
        scripts = root / "scripts"
        shutil.copytree(_SCRIPTS, scripts)
        with Slurm(root, scripts) as running:
            (scripts / "site.sh").write_text((_SITE + site).format(disk=running.node_disk))
            yield running


class Slurm(Lifetime):
    """A context manager of controller, munge and two nodes, idle on entering, ended on leaving."""

    def __init__(self, root: Path, scripts: Path) -> None:
        self.root = root  # folder of everything; keep its path short, for sockets lie below
        self.node_disk = root / "disk"  # where each node sees its own disk; see `disk`
        self._scripts = scripts
        self._config = root / "slurm.conf"

    def begin(self) -> None:
        self._lay_out()
        self._begin("munged", *self._munged())
        eventually(self._munge_socket.is_socket, limit_s=_START_LIMIT_S)
        self._begin("slurmctld", "slurmctld", "-D", "-f", str(self._config))
        for node in NODES:
            self._begin(node, *self._slurmd(node))
        self.parts.callback(self.cancel_all)
        eventually(
            lambda: self.node_states() == ["idle"] * len(NODES),
            limit_s=_START_LIMIT_S,
            pause_s=PAUSE_S,
        )

    def disk(self, node: str) -> Path:
        return self.root / node

    def node_states(self) -> list[str]:
        """Return each node's state as `sinfo` gives it, such as `idle`, `drained` or `idle*`."""
        return self.run("sinfo", "--noheader", "--Node", "--format=%T").split()

    def run(self, *command: str, env: Mapping[str, str] | None = None) -> str:
        """Run a Slurm command to its end; return its output. Raises AssertionError on failure."""
        return printed_by(command, cwd=self.root, env=self._env(env), timeout=_COMMAND_LIMIT_S)

    def submit(self, example: str, *args: object, env: Mapping[str, str] | None = None) -> "Job":
        """Submit a command by one of the examples, with these further variables."""
        path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
        # Slurm names its nodes n1 and n2, which no name server knows.
        own = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "PATH": path, **(env or {})}
        script = self._scripts / example
        output = self.root / f"job-{secrets.token_hex(4)}.out"
        where = (f"--chdir={script.parent}", f"--output={output}")
        command = ("sbatch", "--parsable", *where, str(script), *map(str, args))
        number = self.run(*command, env=clean_environment(own))
        return Job(self, int(number), output)

    def processes(self) -> list[int]:
        """Return the processes of all jobs."""
        found = []
        for process in psutil.process_iter(["environ"]):
            env = process.info["environ"] or {}
            if env.get("SLURM_CONF") == str(self._config) and "SLURM_JOB_ID" in env:
                found.append(process.pid)
        return found

    def cancel_all(self) -> None:
        """Cancel every job, and return when none is left."""
        if jobs := self.run("squeue", "--noheader", "--format=%i").split():
            self.run("scancel", *jobs)
            eventually(
                lambda: not self.run("squeue", "--noheader"), limit_s=JOB_LIMIT_S, pause_s=PAUSE_S
            )

    def _env(self, env: Mapping[str, str] | None = None) -> dict[str, str]:
        # A user's environment names no socket: the tests' own would hide the node's from a job.
        given = os.environ if env is None else env
        own = {
            name: value
            for name, value in given.items()
            if not name.startswith(("SLURM_", "SHARDCACHE_SOCKET"))
        }
        return {**own, "SLURM_CONF": str(self._config)}

    def _begin(self, name: str, *command: str) -> None:
        """Start a daemon. On leaving, it is asked to end, and killed when it does not in time."""
        process = self.parts.enter_context(
            logged(command, self.root / f"{name}.log", cwd=self.root)
        )
        self.parts.callback(process.kill)
        self.parts.callback(process.wait, _COMMAND_LIMIT_S)
        self.parts.callback(process.terminate)

    @property
    def _munge_socket(self) -> Path:
        return self.root / "munge" / "socket"

    def _munged(self) -> list[str]:
        folder = self._munge_socket.parent
        files = {
            "key-file": "key",
            "socket": "socket",
            "pid-file": "pid",
            "log-file": "log",
            "seed-file": "seed",
        }
        return [
            "munged",
            "--foreground",
            *(f"--{option}={folder / name}" for option, name in files.items()),
        ]

    def _slurmd(self, node: str) -> list[str]:
        view = (
            "unshare",
            "--mount",
            "sh",
            "-c",
            _ON_ITS_DISK,
            str(self.disk(node)),
            str(self.node_disk),
        )
        return [*view, "slurmd", "-D", "-N", node, "-f", str(self._config)]

    def _lay_out(self) -> None:
        self.root.chmod(0o755)
        for name in ("munge", "state", "disk", *NODES):
            (self.root / name).mkdir()
        key = self.root / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        self._config.write_text(self._configuration())

    def _configuration(self) -> str:
        root = self.root
        scripts = self._scripts
        address = "NodeHostname=localhost NodeAddr=127.0.0.1"
        lines = [
            "ClusterName=test",
            f"SlurmctldHost=localhost\nSlurmctldPort={free_port()}",
            f"AuthType=auth/munge\nCredType=cred/munge\nAuthInfo=socket={self._munge_socket}",
            "SlurmUser=root\nSlurmdUser=root",
            f"StateSaveLocation={root}/state\nSlurmctldPidFile={root}/slurmctld.pid",
            f"SlurmdSpoolDir={root}/%n.spool\nSlurmdPidFile={root}/%n.pid",
            "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none",
            "SwitchType=switch/none\nMpiDefault=none",
            "SelectType=select/cons_tres\nSelectTypeParameters=CR_CPU",
            "JobAcctGatherType=jobacct_gather/none\nAccountingStorageType=accounting_storage/none",
            "ReturnToService=2\nKillWait=120",
            # A node may have more processors than this machine.
            "SlurmdParameters=config_overrides",
            f"PrologFlags=Alloc\nProlog={scripts}/prolog.sh\nEpilog={scripts}/epilog.sh",
            f"TaskProlog={scripts}/task-prolog.sh",
            *(f"NodeName={node} {address} Port={free_port()} CPUs=8" for node in NODES),
            f"PartitionName=main Nodes={','.join(NODES)} Default=YES",
        ]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class Job:
    """One that was submitted, and the file of what its script prints."""

    cluster: Slurm
    number: int
    output: Path

    def state(self) -> str:
        """Return its state, such as RUNNING; COMPLETING until the epilog ended everywhere."""
        return self.cluster.run(
            "squeue", "--noheader", "--states=all", f"--jobs={self.number}", "--format=%T"
        ).strip()

    def wait(self) -> str:
        """Return the state in which it ended, once it has and its epilogs, too."""
        running = ("PENDING", "RUNNING", "COMPLETING")
        eventually(lambda: self.state() not in running, limit_s=JOB_LIMIT_S, pause_s=PAUSE_S)
        return self.state()

    def cancel(self) -> None:
        self.cluster.run("scancel", str(self.number))

    def said(self) -> str:
        return self.output.read_text() if self.output.exists() else ""
