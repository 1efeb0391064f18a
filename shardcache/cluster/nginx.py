"""One node's nginx: its configuration, and nginx as a child process with folders and figures. Blocking, Linux.

The configuration comes from the template beside this file, in which `@name` stands for a value, and `@@` for `@`. A
line that begins with `[name]` is repeated for each node or store, or stands only where the feature is in use.
"""

import ctypes
import json
import math
import os
import pwd
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from string import Template
from threading import Event, get_native_id

from shardcache.cluster.access_log import AccessLog, Figures
from shardcache.cluster.nginx_probe import answer_of
from shardcache.cluster.tier import MAX_COMMON_NAME, MIB, PEER_NAME, Node, Tier, Tls, Upstream
from shardcache.errors import ConfigError, ShardcacheError
from shardcache.origin.tier.tier_state import QUESTION
from shardcache.store.disk.file_operations import fsync_path
from shardcache.unix_socket import MAX_SOCKET_BYTES, connected

_IDLE_S = 5
_LEASES_MIB = 16  # room for some 50,000 parts that are in hand at the same time
_COPIED = 10  # share of the time that a permission is good in which the owners of parts have it from another node
_WAIT = 180
_MAX_S = 30 * 86400
_PART_BYTES = 8 * MIB
_KEYS_PER_MIB = 8000
_MIN_KEYS_MIB = 16
_MIN_OWNERS_KIB, _KIB_PER_OWNER = 256, 2  # nginx needs 0.9 KiB for each
_SPECIAL = re.compile(r"[$\"'\\\x00-\x1f]")
_SIGNATURE = r"X-Amz-(Algorithm|Content-Sha256|Credential|Date|Expires|Security-Token|Sign\w+)=[\w%/+=.~-]*"
_LUA = re.compile("(ndk|lua)_(http_)?module|lua_|resty")
# Whose permission to read an object counts for whom: that of any node; that for the same url, which proves the secret
# key; and, while the store cannot be asked, that of the same access key.
_SAME_RIGHTS = "$http_host$object"
_OWN_RIGHTS = "$http_host$request_uri|$http_authorization|$http_cookie"
_OWN_KEY = "$access_key|$http_authorization|$http_cookie|$http_host$object"
_LINE = re.compile(r"( *)(?:\[(\w+)\] )?(.*)")

_STATUS_FILE, _ACCESS_LOG, _PID_FILE = "status.json", "access.log", "nginx.pid"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_BOOT, _CLEAN = "boot", "clean"
_PARTS = "parts"
_PERIOD_S = 2.0
_RETRY_S = 5.0
_DISK_PERIOD_S = 60.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SYSTEM_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin")
_STOP_LIMIT_S = 15.0
_POLL_S = 0.02
_RELOAD_LIMIT_S = 60.0

Rows = list[Mapping[str, object]]
Process = subprocess.Popen[bytes]


def time_limits(stall_timeout_s: float) -> dict[str, int]:
    """Return nginx's limits of time in milliseconds, all of which follow from the daemon's stall time-out.

    Two facts have two limits: `store_ms` says how long the object store may be silent, and `lease_ms` when a worker
    that does not show itself is gone, with the parts that it fetches.

    `connect_ms` is to connect to an owner, TLS handshakes included: an owner whose processors are busy is not lost, and
    whoever took over from it would fetch the part a second time. `tries_ms` is to find another owner; `answer_ms` for
    an owner to answer whether it has a request in hand, which the daemon asks as long as no bytes come; `store_ms` for
    the object store to send the next bytes; `front_ms` for the next bytes from an owner, which sends none while it
    waits: it only ends what the daemon has not ended.

    Raises ConfigError if they contradict each other.
    """
    asked_ms, store_ms = 1000 * QUESTION * stall_timeout_s, round(1000 * stall_timeout_s)
    connect_ms, front_ms = round(0.8 * asked_ms), round(_WAIT * 1000 * stall_timeout_s)
    if 0 < connect_ms < asked_ms and 2 * asked_ms < store_ms < front_ms < 1000 * _MAX_S:
        limits = {"connect_ms": connect_ms, "tries_ms": 3 * connect_ms, "answer_ms": connect_ms, "store_ms": store_ms}
        return limits | {"asked_ms": 2 * store_ms, "lease_ms": connect_ms, "front_ms": front_ms}
    remedy = "use that of the daemons, such as 20"
    raise ConfigError(f"no time limits follow from a stall time-out of {stall_timeout_s:g} s", remedy=remedy)


class _Line(Template):
    delimiter = "@"  # nginx's own variables begin with $


def render(tier: Tier, node: Node) -> str:
    """Return the nginx.conf of a node. Raises ConfigError."""
    values, rows = _values(tier, node), _rows(tier, node)
    rows["lua"] = _parts_in_hand(values)
    return "".join(f"{line}\n" for source in _template() for line in _expanded(source, values, rows))


def _parts_in_hand(values: Mapping[str, object]) -> Rows:
    """Return the lines of the Lua program by which nginx's workers know of each other's parts."""
    source = files("shardcache.cluster").joinpath("parts_in_hand.lua").read_text()
    return [{"line": _Line(line).substitute(values)} for line in source.splitlines()]


@cache
def _template() -> list[str]:
    return files("shardcache.cluster").joinpath("nginx.conf.template").read_text().splitlines()


def _expanded(source: str, values: Mapping[str, object], rows: Mapping[str, Rows]) -> Iterator[str]:
    found = _LINE.fullmatch(source)
    assert found is not None
    indent, name, text = found.groups()
    for row in rows[name] if name else [{}]:
        yield indent + _Line(text).substitute(values, **row)


def _values(tier: Tier, node: Node) -> dict[str, object]:
    own = node.at(tier.owner_port)
    owner = own if tier.listen is None else Node(node.name, tier.listen).at(tier.owner_port)
    return {
        "workers": tier.workers,
        "signature": _SIGNATURE,
        "cache": _path(tier.cache(node)),
        "run": _path(tier.run(node)),
        "keys_mib": max(_MIN_KEYS_MIB, math.ceil(2 * tier.max_size_bytes / _PART_BYTES / _KEYS_PER_MIB)),
        "max_size": f"{max(1, tier.max_size_bytes // MIB)}m",
        "min_free": f"{max(1, tier.min_free_bytes // MIB)}m",
        "permitted_s": max(tier.trust_s, 1),
        "leases_mib": _LEASES_MIB,
        "owners_kib": _MIN_OWNERS_KIB + len(tier.nodes) * _KIB_PER_OWNER,
        "weight": tier.weight,
        "may": _SAME_RIGHTS if tier.same_rights else _OWN_RIGHTS,
        "grant": _SAME_RIGHTS if tier.same_rights else _OWN_KEY,
        "front": _socket_path(tier.front(node)),
        "own": own,
        "owner": owner if tier.tls is None else f"{owner} ssl",
        "scheme": "http" if tier.tls is None else "https",
        "peers": json.dumps({"node": node.name, "peers": len(tier.nodes), "digest": tier.digest}),
        "idle_s": _IDLE_S,
        "pooled_s": _IDLE_S - 1,
        **time_limits(tier.stall_timeout_s),
    }


def _rows(tier: Tier, node: Node) -> dict[str, Rows]:
    servers = (*tier.resolvers, *(() if tier.ipv6 else ("ipv6=off",)))
    tls, store_ca = tier.tls_of(node), {"store_ca": _path(tier.store_ca)}
    pem = {} if tls is None else {"certificate": _path(tls.certificate), "key": _path(tls.key), "ca": _path(tls.ca)}
    shared_name = PEER_NAME if tls is not None and tls.is_shared else "$owner_name"
    secured: Rows = [pem | {"owner_name": shared_name}] if pem else []
    # Of these, nginx knows the addresses when it starts.
    known = [store for store in tier.stores if store.is_address or not tier.resolvers]
    groups, copied_s = {store: f"store-{tier.stores.index(store)}" for store in known}, tier.trust_s // _COPIED
    return {
        "user": [{"user": tier.user}] if tier.user else [],
        "resolved": [{"resolvers": " ".join(servers)}] if tier.resolvers else [],
        "outage": [{"outage_s": tier.outage_s}] if tier.outage_s else [],
        "trusted": [{"copied_s": copied_s, "kept_s": tier.trust_s - copied_s}] if tier.trust_s else [],
        "nodes": [{"server": each.at(tier.owner_port)} for each in tier.nodes],
        "stores": [
            {"pattern": _host_pattern(store), "url": f"{store.scheme}://{group}", "host": store.host}
            for store in tier.stores
            for group in (groups.get(store, "$http_host"),)
        ],
        "addresses": [{"group": group, "server": store.server} for store, group in groups.items()],
        "https": [store_ca] if any(store.scheme == "https" for store in tier.stores) else [],
        "tls": secured,
        "noting": secured if tier.outage_s else [],
        "names": [{"name": name} for name in _names(tier)],
        "named": []
        if tls is None
        else [{"server": each.at(tier.owner_port), "name": each.name} for each in tier.nodes],
    }


def _names(tier: Tier) -> Iterable[str]:
    """Return the names of certificates that the tier admits."""
    if tier.tls is None:
        return ()
    names = (tier.tls.name_of(node)[:MAX_COMMON_NAME] for node in tier.nodes)
    return dict.fromkeys(names)


def _host_pattern(store: Upstream) -> str:
    host = re.escape(store.authority).replace("\\-", "-")
    below = "" if store.is_address else "([a-z0-9_-]+[.])*"
    return f"~*^{below}{host}$"


def _socket_path(path: Path) -> str:
    text = _path(path)
    if len(os.fsencode(text)) > MAX_SOCKET_BYTES or ":" in text:
        reason = f"a Unix socket's path has at most {MAX_SOCKET_BYTES} bytes, and nginx takes none with a colon"
        raise ConfigError(reason, url=text, remedy="choose another --run-dir")
    return text


def _path(path: Path) -> str:
    text = str(path)
    if _SPECIAL.search(text):
        raise ConfigError("nginx cannot use a path with $, quotes or line breaks", url=text, remedy="choose another")
    return text


@dataclass(eq=False, repr=False)
class NodeTier:
    """nginx of one node, with a configuration that follows its sources."""

    _read: Callable[[], Tier]  # returns the current tier; called again whenever a file in `_watched` has changed
    _name: str  # name or address of this node in it
    _watched: tuple[Path, ...]  # files whose change has the configuration written again and nginx reload it
    _say: Callable[[str], object]  # called with each message for the operator
    _ready: Callable[[str], object]  # called with a line about the tier, once nginx listens, and after each change

    def __post_init__(self) -> None:
        self._seen = self._stamps()  # first: what changes later is read again
        self._tier = self._read()
        self._node = self._tier.node(self._name)
        self._folder, self._run = self._tier.cache(self._node), self._tier.run(self._node)
        self._config = self._run / "nginx.conf"
        self._figures, self._started_s = Figures(), time.time()
        self._stale: str | None = None  # the reason that nginx does not use the sources as they are now
        self._tried_s = 0.0

    def run(self, stopping: Event) -> int:
        """Run nginx until `stopping` is set, or it ends; return its exit status. Raises ConfigError."""
        nginx = _program()
        try:
            user = self._tier.user or _default_user(nginx)
            _make_folder(self._folder, 0o700, user)
            _make_folder(self._run, 0o750, user)
            if prepare(self._folder):
                self._say("unclean shutdown: the tier's cache was cleared")
            self._config.write_text(render(self._tier, self._node))
        except OSError as exn:
            remedy = "choose another --cache-dir and --run-dir, or give this user the right to write there"
            raise ConfigError(f"cannot write {exn.filename}: {exn.strerror}", remedy=remedy) from None
        _check(nginx, self._config)
        _clear_front(self._tier.front(self._node))
        log = AccessLog(self._folder / _ACCESS_LOG, self._tier.owner_port)
        process = _start(nginx, self._config)
        try:
            if _wait_until_listening(process, self._run / _PID_FILE):
                self._tell_ready()
            self._follow(nginx, process, log, stopping)
        finally:
            status = _end(process)
        finish(self._folder)
        return 0 if stopping.is_set() else status

    def _follow(self, nginx: str, process: Process, log: AccessLog, stopping: Event) -> None:
        measured_s = -_DISK_PERIOD_S
        while process.poll() is None:
            if time.monotonic() - measured_s >= _DISK_PERIOD_S:
                self._figures.measure(self._folder / _PARTS)
                measured_s = time.monotonic()
            log.read(self._figures)
            if log.rotate():
                process.send_signal(signal.SIGUSR1)
            self._publish()
            if stopping.wait(_PERIOD_S):
                return
            is_due = self._stale is not None and time.monotonic() - self._tried_s >= _RETRY_S
            if (now := self._stamps()) != self._seen or is_due:
                self._seen, self._tried_s = now, time.monotonic()
                self._reload(nginx, process)

    def _reload(self, nginx: str, process: Process) -> None:
        """Have nginx use the sources as they are now; until they can be used, the previous configuration stays."""
        previous = self._config.read_text()
        try:
            tier = self._read()
            self._config.write_text(render(tier, tier.node(self._name)))
            _check(nginx, self._config)
            _reload_nginx(process, str(tier.front(self._node)), tier.digest)
        except (ShardcacheError, OSError) as exn:
            self._config.write_text(previous)
            reason = exn.message if isinstance(exn, ShardcacheError) else str(exn)
            if reason != self._stale:
                self._say(f"the previous configuration stays in use: {exn}")
            self._stale = reason
            return
        self._tier, self._stale = tier, None
        self._tell_ready()

    def _tell_ready(self) -> None:
        count = len(self._tier.nodes)
        self._ready(f"{count} node{'' if count == 1 else 's'}, digest {self._tier.digest}")

    def _publish(self) -> None:
        """Write the figures to the file that nginx serves."""
        free_bytes = shutil.disk_usage(self._folder).free
        page: dict[str, object] = {"node": self._node.name, "started_s": self._started_s, "free_bytes": free_bytes}
        page |= {"stale": self._stale, "certificate_expires_s": _expiry_s(self._tier.tls_of(self._node))}
        fresh = self._run / f".{_STATUS_FILE}"
        fresh.write_text(json.dumps(page | asdict(self._figures)))
        fresh.chmod(0o644)  # for nginx's workers
        fresh.replace(self._run / _STATUS_FILE)

    def _stamps(self) -> list[tuple[int, int]]:
        stamps: list[tuple[int, int]] = []
        for path in self._watched:
            with suppress(OSError):  # being replaced
                stamps.append(((found := path.stat()).st_mtime_ns, found.st_ino))
        return stamps


def _make_folder(folder: Path, mode: int, user: str) -> None:
    """Create a folder, for a user and its group if root creates it; one that exists stays as it is."""
    if folder.exists():
        return
    folder.mkdir(parents=True, mode=0o700)
    folder.chmod(mode)
    if os.geteuid() == 0:
        shutil.chown(folder, user, pwd.getpwnam(user).pw_gid)


def _clear_front(front: Path) -> None:
    """Remove the socket that a killed nginx left, once it has ended. Raises ConfigError if it does not."""
    deadline_s = time.monotonic() + _STOP_LIMIT_S
    while _is_served(front):
        if time.monotonic() > deadline_s:
            raise ConfigError("another nginx serves this node's daemon", url=str(front), remedy="end it first")
        time.sleep(_POLL_S)
    front.unlink(missing_ok=True)


def _is_served(front: Path) -> bool:
    with suppress(OSError), connected(front, _POLL_S):
        return True
    return False


def prepare(folder: Path, boot_id: str | None = None) -> bool:
    """Make a cache folder ready for use; return True if its parts were removed.

    After a power loss, files may hold bytes that never reached the disk. Parts are kept if this machine has not booted
    since they were written, or if the tier was stopped before it went down.
    """
    boot_id = boot_id or _BOOT_ID.read_text().strip()
    boot, clean = folder / _BOOT, folder / _CLEAN
    written = boot.read_text() if boot.exists() else None
    unclean = (folder / _PARTS).exists() and written != boot_id and not clean.exists()
    if unclean:
        shutil.rmtree(folder / _PARTS)
    boot.write_text(boot_id)
    clean.unlink(missing_ok=True)
    fsync_path(folder)
    return unclean


def finish(folder: Path) -> None:
    """Mark a folder as cleanly stopped, once all of it is on the disk."""
    os.sync()
    (folder / _CLEAN).touch()
    fsync_path(folder)


def _expiry_s(tls: Tls | None) -> float | None:
    """Return the time at which a node's certificates expire; None if it has none, or cannot tell."""
    try:
        from shardcache.cluster.authority import expiry_s

        return None if tls is None else expiry_s(tls)
    except (OSError, ValueError, ModuleNotFoundError):  # being replaced; nginx was started without the extra `cluster`
        return None


def _program() -> str:
    """Return the path of nginx on this machine. Raises ConfigError."""
    if (found := shutil.which("nginx", path=os.pathsep.join((os.environ.get("PATH", ""), *_SYSTEM_FOLDERS)))) is None:
        remedy = "apt-get install nginx-light libnginx-mod-http-lua, or your system's nginx ≥ 1.22 with its Lua module"
        raise ConfigError("nginx is not installed", remedy=remedy)
    return found


def _default_user(nginx: str) -> str:
    """Return the user of its workers if root starts it without naming one."""
    built = subprocess.run([nginx, "-V"], capture_output=True, text=True, check=False).stderr
    found = re.search(r"--user=(\S+)", built)
    return found[1] if found else "nobody"


def _check(nginx: str, config: Path) -> None:
    """Raise ConfigError if nginx rejects a file of its configuration."""
    done = subprocess.run([*_command(nginx, config), "-t", "-q"], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[0] if done.stderr.strip() else f"exit status {done.returncode}"
        remedy = "apt-get install libnginx-mod-http-lua" if _LUA.search(reason) else "correct the options"
        raise ConfigError(f"nginx rejects its configuration: {reason}", url=str(config), remedy=remedy)


def _start(nginx: str, config: Path) -> Process:
    """Start nginx. Call it in the main thread of a process without others: the kernel ties nginx to the thread."""
    libc, parent = ctypes.CDLL(None), os.getpid()
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)  # workers of a killed nginx become this process's own children

    def end_with_parent() -> None:
        # SIGTERM, so that nginx ends its workers, too.
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before that call
            os._exit(1)

    return subprocess.Popen(_command(nginx, config), stdin=subprocess.DEVNULL, preexec_fn=end_with_parent)


def _wait_until_listening(process: Process, pid_file: Path) -> bool:
    """Return True as soon as nginx has bound its addresses, which it tells by its pid file; False if it has ended."""
    while process.poll() is None:
        with suppress(FileNotFoundError):
            if pid_file.read_text().strip() == str(process.pid):
                return True
        time.sleep(_POLL_S)
    return False


def _reload_nginx(process: Process, front: str, digest: str) -> None:
    """Have nginx use its changed configuration. Raises ConfigError unless it then serves the list with this digest."""
    process.send_signal(signal.SIGHUP)
    deadline_s = time.monotonic() + _RELOAD_LIMIT_S
    while time.monotonic() < deadline_s:
        with suppress(OSError, ValueError):
            if digest in answer_of(front):
                return
        time.sleep(_POLL_S)
    raise ConfigError("nginx did not load its new configuration", remedy="see its messages")


def _end(process: Process) -> int:
    """Stop nginx, and kill the workers that it left if it was killed; return its exit status."""
    process.terminate()
    try:
        process.wait(_STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
    status = process.wait()
    while left := Path(f"/proc/self/task/{get_native_id()}/children").read_text().split():
        for pid in map(int, left):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return status


def _command(nginx: str, config: Path) -> list[str | Path]:
    return [nginx, "-e", "stderr", "-c", config]  # else it begins with a log in a folder of root's
