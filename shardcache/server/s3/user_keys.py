"""Keys for the S3 endpoint.

A key is an id and a secret with which an S3 client signs its requests. Users get keys over the Unix
socket, where the kernel identifies each user. The keys are kept in a file in the cache folder, so
that they remain valid when the daemon restarts.
"""

import asyncio
import contextlib
import json
import os
import secrets
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import structlog

from shardcache.access.rules import Peer

log = structlog.get_logger()

_ID_BYTES = 10
_SECRET_BYTES = 30
_ID_PREFIX = "SHARDCACHE"
# A user who asks again gets the same key while more than this fraction of a new key's life is left.
_MIN_LIFE_LEFT = 0.5
# Expired keys are remembered for this time, so that their users get an error that says that the
# key has expired.
_REMEMBERED_S = 7 * 24 * 3600
_MAX_KEYS = 10_000
_OWNER_ONLY = 0o600
_ACCESS_BY_OTHERS = 0o077  # permission bits of users other than the owner


@dataclass(frozen=True, slots=True)
class S3Key:
    """A key of a user.

    Attributes:
        access_key: its public id.
        secret_key: the secret with which requests are signed.
        peer: the user, with the groups that the user was in when the key was given.
        expires_s: time at which the key expires, in seconds since the Unix epoch.
    """

    access_key: str
    secret_key: str
    peer: Peer
    expires_s: float

    def to_line(self) -> str:
        """Return the key's line in the file: a JSON array of five fields."""
        peer = self.peer
        fields = [self.access_key, self.secret_key, peer.uid, sorted(peer.gids), self.expires_s]
        return json.dumps(fields) + "\n"

    @classmethod
    def from_line(cls, line: bytes) -> "S3Key | None":
        """Return the key of a line; None if the line is damaged."""
        try:
            fields = json.loads(line)
        except ValueError:
            return None
        match fields:
            case [str(access_key), str(secret_key), int(uid), list(gids), int() | float() as end_s]:
                if all(type(gid) is int for gid in gids):
                    return cls(access_key, secret_key, Peer(uid, frozenset(gids)), float(end_s))
        return None


class S3Keys:
    """The keys of all users, kept in a file that only the daemon's user can read.

    Args:
        path: path of that file.
        unfinished: path on the same filesystem, for a new file until it replaces the old one.
        life_s: time for which a new key is valid.
    """

    def __init__(self, path: Path, unfinished: Path, life_s: float) -> None:
        self._path = path
        self._unfinished = unfinished
        self._life_s = life_s
        self._keys: dict[str, S3Key] = {}  # by id, the oldest key first
        self._latest: dict[Peer, S3Key] = {}  # by user, the newest key
        self._save_lock = asyncio.Lock()

    def restore(self) -> None:
        """Restore the keys that an earlier daemon gave. Blocks."""
        for line in _private_lines(self._path):
            key = S3Key.from_line(line)
            if key is not None:
                self._add(key)
        self._forget_old(time.time())

    async def give(self, peer: Peer) -> S3Key:
        """Return a key for a user, which is valid for at least half of a new key's life."""
        now_s = time.time()
        key = self._latest.get(peer)
        if key is not None and self._may_be_given_again(key.expires_s - now_s):
            return key
        key = S3Key(
            access_key=_ID_PREFIX + secrets.token_hex(_ID_BYTES).upper(),
            secret_key=secrets.token_urlsafe(_SECRET_BYTES),
            peer=peer,
            expires_s=now_s + self._life_s,
        )
        self._add(key)
        self._forget_old(now_s)
        await self._save()
        return key

    def get(self, access_key: str) -> S3Key | None:
        """Return a key by its id; None if it is not known. The key may have expired."""
        return self._keys.get(access_key)

    def _may_be_given_again(self, left_s: float) -> bool:
        """Return whether to give a key again that is valid for another `left_s`.

        A key that is valid for longer than a new one is not given again: an earlier daemon made it,
        which was configured to give keys a longer life.
        """
        return self._life_s * _MIN_LIFE_LEFT < left_s <= self._life_s

    def _add(self, key: S3Key) -> None:
        """Add a key as its user's newest."""
        self._keys[key.access_key] = key
        self._latest[key.peer] = key

    def _forget_old(self, now_s: float) -> None:
        """Forget keys that expired long ago, and the oldest keys if there are too many."""
        keys = self._keys.values()
        remembered = [key for key in keys if now_s - key.expires_s <= _REMEMBERED_S]
        kept = remembered[-_MAX_KEYS:]
        self._keys = {key.access_key: key for key in kept}
        self._latest = {key.peer: key for key in kept}

    async def _save(self) -> None:
        """Write the keys to the file. An error is only logged: this daemon still has the keys."""
        async with self._save_lock:
            lines = [key.to_line() for key in self._keys.values()]
            try:
                await asyncio.to_thread(_write_for_owner, self._path, self._unfinished, lines)
            except OSError as exn:
                log.warning(
                    "cannot write the keys of the S3 endpoint; a restart will make them invalid",
                    file=str(self._path),
                    cause=exn.strerror,
                )


def _private_lines(path: Path) -> list[bytes]:
    """Return the lines of a file that only this user can read or write. Blocks.

    Returns no lines, and logs the reason, if the file cannot be read, or if other users could read
    or write it.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return []
    except OSError as exn:
        log.warning("cannot read the keys of the S3 endpoint", file=str(path), cause=exn.strerror)
        return []
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(file.fileno())
        is_own = status.st_uid == os.getuid()
        is_shared = bool(stat.S_IMODE(status.st_mode) & _ACCESS_BY_OTHERS)
        if not is_own or is_shared:
            log.warning(
                "the keys of the S3 endpoint could be read or written by others; they are invalid",
                file=str(path),
            )
            return []
        return file.read().splitlines()


def _write_for_owner(path: Path, unfinished: Path, lines: Iterable[str]) -> None:
    """Replace a file with one that only its owner can read or write. Blocks. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        # A leftover is not written to, because other processes may have it open.
        unfinished.unlink()
    fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _OWNER_ONLY)
    with os.fdopen(fd, "w", encoding="ascii") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
