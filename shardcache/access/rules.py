"""Access control: the urls that a user may fetch with the daemon's permissions, and see."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardcache.access.urls import LOCAL, STORES, WEB, canonical, checked, host_of, is_near, protocol_of
from shardcache.config import AllowRule
from shardcache.errors import NotAllowedError, ShardcacheError


@dataclass(frozen=True, slots=True)
class Peer:
    """The user behind a request."""

    uid: int
    gids: frozenset[int] = frozenset()  # ids of all groups that the user is in

    @property
    def is_trusted(self) -> bool:
        """True for the daemon's own user and root, who have its permissions anyway."""
        return self.uid in (0, os.getuid())


class _Rule:
    def __init__(self, rule: AllowRule) -> None:
        prefix = canonical(rule.prefix)
        self._uids, self._gids = rule.uids, rule.gids
        self.is_for_all = not (rule.uids or rule.gids)
        self._prefixes = tuple({prefix, _real(prefix)})
        # `s3://data` must not allow `s3://data-private`; a prefix that does not end with the host may be any string.
        place = prefix.partition("://")[2]
        self._is_host = bool(place) and "/" not in place

    def covers(self, url: str) -> bool:
        """Return whether a canonical url starts with the prefix."""
        ends = ("", "/") if self._is_host else None
        return any(
            url.startswith(start) and (ends is None or url[len(start) :][:1] in ends) for start in self._prefixes
        )

    def includes(self, other: "_Rule") -> bool:
        """Return whether this rule applies to every user to whom `other` applies."""
        return self.is_for_all or (not other.is_for_all and other._uids <= self._uids and other._gids <= self._gids)

    def is_for(self, peer: Peer) -> bool:
        return self.is_for_all or peer.is_trusted or peer.uid in self._uids or not self._gids.isdisjoint(peer.gids)


class AllowList:
    """Rules, at least one of which must allow a url.

    Without rules, everything is allowed except resources that only the daemon can reach, through its permissions or
    its place on the network: local files, the node and its cloud's metadata service (`is_near`), and filesystems that
    are not object stores. The daemon's own user and root may fetch these too.
    """

    def __init__(self, rules: Sequence[AllowRule]) -> None:
        self._rules = tuple(map(_Rule, rules))

    def __repr__(self) -> str:
        return f"<AllowList of {len(self._rules)} rules>"

    @property
    def far_only(self) -> bool:
        """True if names that resolve to near hosts (`is_near`) are refused: only rules can allow them."""
        return not self._rules

    def check(self, url: str, peer: Peer) -> None:
        """Raise NotAllowedError unless the user may fetch `url`, ConfigError if the url is malformed or deceptive."""
        checked(url)
        if not self._rules:
            _check_default(url, peer)
            return
        place = canonical(url)
        if not any(rule.covers(place) and rule.is_for(peer) for rule in self._rules):
            raise NotAllowedError("the daemon's allow rules do not permit you to fetch the url", url=url)

    def check_all(self, urls: Iterable[str], peer: Peer) -> None:
        """Check every url as `check` does."""
        for url in urls:
            self.check(url, peer)

    def shows(self, url: str, peer: Peer) -> bool:
        """Return whether the user may see that `url` is cached, and evict it: if allowed to fetch it, or trusted."""
        if peer.is_trusted:
            return True
        try:
            self.check(url, peer)
        except ShardcacheError:
            return False
        return True

    def check_hop(self, source: str, target: str) -> None:
        """Raise NotAllowedError unless everyone who may fetch `source` may also fetch `target`, to which it leads."""
        checked(target)
        if self._rules:
            begins, ends = self._covering(canonical(source)), self._covering(canonical(target))
            allowed = bool(begins) and all(any(end.includes(begin) for end in ends) for begin in begins)
        else:
            web = protocol_of(target) in WEB
            allowed = not web or not is_near(host_of(target)) or host_of(target) == host_of(source)
        if not allowed:
            raise NotAllowedError(f"the url leads to {target}, which the daemon is not allowed to fetch", url=source)

    def _covering(self, place: str) -> list[_Rule]:
        return [rule for rule in self._rules if rule.covers(place)]


def _check_default(url: str, peer: Peer) -> None:
    protocol, refusal = protocol_of(url), ""
    if protocol in STORES or peer.is_trusted:
        return
    if protocol in LOCAL:
        refusal = "local files would be read with the daemon's permissions, not yours"
    elif protocol not in WEB:
        refusal = f"{protocol}:// is not an object store and would be read with the daemon's permissions"
    elif is_near(host_of(url)):
        refusal = "the host is this node or its cloud's metadata service"
    if refusal:
        raise NotAllowedError(refusal, url=url)


def _real(prefix: str) -> str:
    """Return a local prefix with symbolic links resolved, as urls resolved through links will show it."""
    protocol, _, path = prefix.partition("://")
    if protocol not in LOCAL:
        return prefix
    is_folder = not path.endswith("/") and Path(path).is_dir()
    folder, slash, rest = (path, "", "") if is_folder else path.rpartition("/")
    return f"{protocol}://{os.path.realpath(folder or '/').rstrip('/')}{slash}{rest}"
