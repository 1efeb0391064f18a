"""Which urls a user may have fetched with the daemon's rights, and see."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardcache.config import AllowRule
from shardcache.errors import NotAllowedError, ShardcacheError
from shardcache.origin.urls import LOCAL, WEB, canonical, checked, host_of, protocol_of
from shardcache.transport.addresses import is_near

# What is reached by the network, at a place that its service has chosen, with rights that the daemon was given.
_STORES = frozenset(
    {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "hf", "oss", "oci", "ocilake", "tos", "tosfs", "lakefs"}
)


@dataclass(frozen=True, slots=True)
class Peer:
    """A user who asks for something.

    Attributes:
        uid: user id.
        gids: ids of all groups that the user is in.
    """

    uid: int
    gids: frozenset[int] = frozenset()

    @property
    def is_trusted(self) -> bool:
        """Whether the user has the daemon's rights anyway: its own user, and root."""
        return self.uid in (0, os.getuid())


class _Rule:
    def __init__(self, rule: AllowRule) -> None:
        prefix = canonical(rule.prefix)
        self._uids, self._gids = rule.uids, rule.gids
        self.is_for_all = not (rule.uids or rule.gids)
        self._prefixes = tuple({prefix, _real(prefix)})
        # `s3://data` must not open `s3://data-private`; below the host, or before it, a prefix is any string.
        place = prefix.partition("://")[2]
        self._is_host = bool(place) and "/" not in place

    def covers(self, url: str) -> bool:
        """Tell whether a canonical url lies below the prefix."""
        return any(
            url.startswith(prefix) and (not self._is_host or url[len(prefix) :][:1] in ("", "/"))
            for prefix in self._prefixes
        )

    def includes(self, other: _Rule) -> bool:
        """Tell whether it is for everybody whom the other is for."""
        return self.is_for_all or (not other.is_for_all and other._uids <= self._uids and other._gids <= self._gids)

    def is_for(self, peer: Peer) -> bool:
        """Tell whether the user may use it."""
        return self.is_for_all or peer.is_trusted or peer.uid in self._uids or not self._gids.isdisjoint(peer.gids)


class AllowList:
    """Rules, of which one must allow a url.

    Without any, everything but what only the daemon's own rights or its place on the network can reach: local files,
    hosts that are near (`is_near`), and filesystems that are no object store. Its own user and root may have these too.
    """

    def __init__(self, rules: Sequence[AllowRule]) -> None:
        self._rules = tuple(map(_Rule, rules))

    def __repr__(self) -> str:
        return f"<AllowList of {len(self._rules)} rules>"

    @property
    def far_only(self) -> bool:
        """Whether names that lead to this node are refused: where no rule says that they are meant."""
        return not self._rules

    def check(self, url: str, peer: Peer) -> None:
        """Raise NotAllowedError unless the user may have `url` fetched, ConfigError where it is no honest url."""
        checked(url)
        if not self._rules:
            _check_default(url, peer)
            return
        place = canonical(url)
        if not any(rule.covers(place) and rule.is_for(peer) for rule in self._rules):
            raise NotAllowedError("the url lies outside what this daemon may fetch for you", url=url)

    def check_all(self, urls: Iterable[str], peer: Peer) -> None:
        """Do so with each of many."""
        for url in urls:
            self.check(url, peer)

    def shows(self, url: str, peer: Peer) -> bool:
        """Tell whether the user may see that `url` is here, and remove it: if he may fetch it, or runs the daemon."""
        if peer.is_trusted:
            return True
        try:
            self.check(url, peer)
        except ShardcacheError:
            return False
        return True

    def check_hop(self, source: str, target: str) -> None:
        """Raise NotAllowedError unless everybody who may have `source` fetched may have `target`, to which it leads."""
        checked(target)
        if self._rules:
            begins, ends = self._covering(canonical(source)), self._covering(canonical(target))
            allowed = bool(begins) and all(any(end.includes(begin) for end in ends) for begin in begins)
        else:
            web = protocol_of(target) in WEB
            allowed = not web or not is_near(host_of(target)) or host_of(target) == host_of(source)
        if not allowed:
            raise NotAllowedError(f"it leads to {target}, which lies outside what this daemon may fetch", url=source)

    def _covering(self, place: str) -> list[_Rule]:
        return [rule for rule in self._rules if rule.covers(place)]


def _check_default(url: str, peer: Peer) -> None:
    protocol = protocol_of(url)
    if peer.is_trusted or protocol in _STORES:
        return
    if protocol in LOCAL:
        raise NotAllowedError("local files are read with the daemon's rights, not with yours", url=url)
    if protocol not in WEB:
        raise NotAllowedError(f"{protocol}:// is no object store, and used with the daemon's rights", url=url)
    if is_near(host_of(url)):
        raise NotAllowedError("the host is this node itself or its cloud's metadata service", url=url)


def _real(prefix: str) -> str:
    """Return a local prefix as it is once links are followed: that is how links into it look."""
    protocol, _, path = prefix.partition("://")
    if protocol not in LOCAL:
        return prefix
    is_folder = not path.endswith("/") and Path(path).is_dir()
    folder, slash, rest = (path, "", "") if is_folder else path.rpartition("/")
    return f"{protocol}://{os.path.realpath(folder or '/').rstrip('/')}{slash}{rest}"
