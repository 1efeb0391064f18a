"""A container of a pod's spec for an OCI runtime: user, capabilities, calls, mounts."""

import json
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Json = dict[str, Any]

# What container engines on Debian apply where a pod asks for RuntimeDefault; of
# golang-github-containers-common.
SECCOMP_PROFILE = Path("/usr/share/containers/seccomp.json")
# What those engines leave to a container of which nothing is dropped.
_DEFAULT_CAPABILITIES = frozenset(
    (
        "CHOWN",
        "DAC_OVERRIDE",
        "FOWNER",
        "FSETID",
        "KILL",
        "NET_BIND_SERVICE",
        "SETFCAP",
        "SETGID",
        "SETPCAP",
        "SETUID",
    )
)
_NAMESPACES = ("pid", "mount", "ipc", "uts")
_ARCHES = ("amd64", "x86", "x32")


@dataclass(frozen=True, slots=True)
class Mount:
    source: Path
    target: str
    read_only: bool = False
    propagation: str = "rprivate"

    def to_json(self) -> Json:
        options = ["rbind", self.propagation, "ro" if self.read_only else "rw"]
        return {
            "type": "bind",
            "source": str(self.source),
            "destination": self.target,
            "options": options,
        }


@dataclass(frozen=True, slots=True)
class Security:
    uid: int
    gid: int
    gids: tuple[int, ...]  # supplementary groups
    # By their names without CAP_; a process of another user than root gets none of them.
    capabilities: frozenset[str]
    read_only_root: bool
    may_gain_privileges: bool
    confined: bool

    @classmethod
    def of(cls, pod: Mapping[str, Any], container: Mapping[str, Any]) -> "Security":
        """Read it from the securityContext of a pod's spec and of one of its containers.

        Raises ValueError for a container that must not be root, and is or may be.
        """
        both: Json = {**pod.get("securityContext", {}), **container.get("securityContext", {})}
        uid = both.get("runAsUser", 0)
        if both.get("runAsNonRoot") and uid == 0:
            raise ValueError(f"the container {container['name']} must not run as root, and does")
        changes = both.get("capabilities", {})
        dropped = set(changes.get("drop", ()))
        kept = frozenset() if "ALL" in dropped else _DEFAULT_CAPABILITIES - dropped
        groups = [
            *both.get("supplementalGroups", ()),
            *([both["fsGroup"]] if "fsGroup" in both else ()),
        ]
        return cls(
            uid,
            both.get("runAsGroup", 0),
            tuple(groups),
            kept | frozenset(changes.get("add", ())),
            bool(both.get("readOnlyRootFilesystem")),
            both.get("allowPrivilegeEscalation", True),
            both.get("seccompProfile", {}).get("type") == "RuntimeDefault",
        )


def runtime_config(
    root: Path,
    args: Sequence[str],
    env: Mapping[str, str],
    security: Security,
    mounts: Iterable[Mount],
    network: Path | None = None,
) -> Json:
    """Return a container's `config.json`: it has its own processes, mounts and IPC.

    Args:
        args: its program.
        network: namespace of its network; None for that of this process.
    """
    proposed = _proposed()
    folders = [mount.to_json() for mount in mounts]
    replaced = {"/sys/fs/cgroup", *(folder["destination"] for folder in folders)}
    capabilities = sorted(f"CAP_{name}" for name in security.capabilities)
    effective = capabilities if security.uid == 0 else []
    sets = {"bounding": capabilities, "effective": effective, "permitted": effective}
    joined = () if network is None else ({"type": "network", "path": str(network)},)
    linux: Json = {name: proposed["linux"][name] for name in ("maskedPaths", "readonlyPaths")}
    linux["namespaces"] = [*({"type": kind} for kind in _NAMESPACES), *joined]
    if security.confined:
        linux["seccomp"] = _seccomp(security.capabilities)
    return {
        "ociVersion": proposed["ociVersion"],
        "root": {"path": str(root), "readonly": security.read_only_root},
        "hostname": root.parent.name,
        "process": {
            "args": list(args),
            "env": [f"{name}={value}" for name, value in env.items()],
            "cwd": "/",
            "user": {"uid": security.uid, "gid": security.gid, "additionalGids": security.gids},
            "capabilities": sets,
            "noNewPrivileges": not security.may_gain_privileges,
        },
        "mounts": [mount for mount in proposed["mounts"] if mount["destination"] not in replaced]
        + folders,
        "linux": linux,
    }


def _proposed() -> Json:
    """Return runc's proposed configuration, with the mounts and masks of container engines."""
    with tempfile.TemporaryDirectory() as bundle:
        subprocess.run(["runc", "spec", "--bundle", bundle], check=True)
        config: Json = json.loads(Path(bundle, "config.json").read_text())
    return config


def _seccomp(capabilities: frozenset[str]) -> Json:
    """Return the engines' profile, cut to what holds for these capabilities on this processor."""
    profile = json.loads(SECCOMP_PROFILE.read_text())
    held = {f"CAP_{name}" for name in capabilities}
    rules = [rule for rule in profile["syscalls"] if _inventory(rule, held)]
    return {
        "defaultAction": profile["defaultAction"],
        "defaultErrnoRet": profile["defaultErrnoRet"],
        "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"],
        "syscalls": [_rule(rule) for rule in rules],
    }


def _inventory(rule: Mapping[str, Any], held: set[str]) -> bool:
    wanted = rule.get("includes") or {}
    refused = rule.get("excludes") or {}
    if held & set(refused.get("caps", ())) or set(_ARCHES[:1]) & set(refused.get("arches", ())):
        return False
    return set(wanted.get("caps", ())) <= held and (
        not wanted.get("arches") or bool(set(_ARCHES) & set(wanted["arches"]))
    )


def _rule(rule: Mapping[str, Any]) -> Json:
    kept = {name: rule[name] for name in ("names", "action", "args") if rule.get(name)}
    return kept | ({"errnoRet": rule["errnoRet"]} if rule.get("errnoRet") is not None else {})
