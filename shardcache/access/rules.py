"""Rules for the urls that a user may request: those of the `allow` setting, or the defaults.

The daemon reads with its own permissions for users who may have fewer. So its caches, listings and
endpoints check each url with an `AllowList`. A peer is the user whose process sent a request; a
peer is trusted if it is root or the daemon's own user. A near host is this node itself or its
cloud's metadata service; a far host is any other. Urls are compared in their canonical form, as the
url of one object may have several spellings.
"""

import grp
import os
import pwd
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardcache.access.deceptive import checked, url_with_prefix
from shardcache.access.near import is_near
from shardcache.access.protocols import LOCAL, STORES, WEB
from shardcache.access.urls import canonical, host_of, protocol_of
from shardcache.shared.exceptions import NotAllowedError, ShardcacheError
from shardcache.shared.wording.remedies import did_you_mean


@dataclass(frozen=True, slots=True)
class Peer:
    """The user behind a request.

    Attributes:
        uid: id of the user.
        gids: ids of all groups that the user is in.
    """

    uid: int
    gids: frozenset[int] = frozenset()

    @property
    def is_trusted(self) -> bool:
        """True for the daemon's own user and root, who have its permissions anyway."""
        return self.uid in (0, os.getuid())


_RULE_KEYS = ("prefix", "users", "groups")
_NO_RULE = "an entry must be a url prefix, or a table with prefix and, optionally, users and groups"


@dataclass(frozen=True, slots=True)
class AllowRule:
    """One entry of `allow`: who may request the urls that begin with a prefix.

    Attributes:
        prefix: beginning of the urls.
        uids: ids of users who may request the urls.
        gids: ids of groups whose members may request the urls, too. If `uids` and `gids` are both
            empty, every user may.
    """

    prefix: str
    uids: frozenset[int] = frozenset()
    gids: frozenset[int] = frozenset()

    @classmethod
    def parse(cls, entry: object) -> "AllowRule":
        """Parse an entry: a prefix, or a table with `prefix`, `users` and `groups`.

        Users and groups are names or numbers. Raises ValueError for any other entry, and for a user
        or group that this system does not know.
        """
        match entry:
            case AllowRule():
                return entry
            case str(prefix) if prefix:
                return cls(prefix)
            case {**table}:  # any mapping
                return cls._of_table(table)
        raise ValueError(_NO_RULE)

    @classmethod
    def _of_table(cls, table: dict[Any, Any]) -> "AllowRule":
        """Return the rule of a table. Raises ValueError."""
        unknown = next(iter(table.keys() - _RULE_KEYS), None)
        if unknown is not None:
            similar = did_you_mean(str(unknown), _RULE_KEYS)
            raise ValueError(f"unknown key {unknown!r} in a rule{similar}")
        prefix = table.get("prefix")
        if not isinstance(prefix, str) or not prefix:
            raise ValueError(_NO_RULE)

        users = _ids(table.get("users", ()), "users")
        groups = _ids(table.get("groups", ()), "groups")
        is_restricted = "users" in table or "groups" in table
        if is_restricted and not users and not groups:
            raise ValueError(f"the rule for {prefix} applies to nobody")
        return cls(prefix, users, groups)


def _ids(names: object, kind: str) -> frozenset[int]:
    """Return the ids of users or groups. Raises ValueError.

    Args:
        kind: "users" or "groups".
    """
    if not isinstance(names, (list, tuple)):
        # This is not a TypeError, because pydantic does not report a TypeError as invalid input.
        raise ValueError(f"{kind} must be a list of names or numbers")  # noqa: TRY004
    return frozenset(_id(name, kind) for name in names)


def _id(name: object, kind: str) -> int:
    """Return the id of a user or group, given by name or number. Raises ValueError.

    Args:
        kind: "users" or "groups".
    """
    if type(name) is int and name >= 0:
        return name
    try:
        if kind == "users":
            return pwd.getpwnam(str(name)).pw_uid
        return grp.getgrnam(str(name)).gr_gid
    except (KeyError, ValueError):
        raise ValueError(f"{name!r} is not among this system's {kind}") from None


class _CanonicalRule:
    """An `AllowRule` with its prefix in the form in which urls are compared.

    Attributes:
        is_for_all: True if the rule applies to every user.
        prefixes: the prefix; for a local path, also the prefix with its symbolic links resolved.
    """

    def __init__(self, rule: AllowRule) -> None:
        prefix = canonical(rule.prefix)
        self.uids = rule.uids
        self.gids = rule.gids
        self.is_for_all = not (rule.uids or rule.gids)
        self.prefixes = tuple({prefix, _real(prefix)})
        # A prefix that ends with the host or bucket must match the whole name: `s3://data` must not
        # allow `s3://data-private`. Any other prefix may end anywhere in the url.
        _, _, after_protocol = prefix.partition("://")
        self._ends_with_host = bool(after_protocol) and "/" not in after_protocol

    def covers(self, url: str) -> bool:
        """Return whether a canonical url starts with the prefix."""
        return any(self._starts_with(url, prefix) for prefix in self.prefixes)

    def is_within(self, folder: str) -> bool:
        """Return whether the rule's prefix begins with `folder`, a prefix of urls."""
        return any(prefix.startswith(folder) for prefix in self.prefixes)

    def is_for_users_of(self, other: "_CanonicalRule") -> bool:
        """Return whether this rule applies to every user to whom `other` applies."""
        if self.is_for_all:
            return True
        if other.is_for_all:
            return False
        return other.uids <= self.uids and other.gids <= self.gids

    def is_for(self, peer: Peer) -> bool:
        """Return whether the rule applies to a user."""
        if self.is_for_all or peer.is_trusted or peer.uid in self.uids:
            return True
        return not self.gids.isdisjoint(peer.gids)

    def _starts_with(self, url: str, prefix: str) -> bool:
        """Return whether a url starts with a prefix; a host or bucket must match as a whole."""
        if not url.startswith(prefix):
            return False
        next_char = url[len(prefix) : len(prefix) + 1]
        return not self._ends_with_host or next_char in ("", "/")


class AllowList:
    """Rules for urls: at least one of them must allow a url.

    Without rules, everything is allowed except resources that only the daemon can reach, through
    its permissions or its place on the network. These are local files, the node and its cloud's
    metadata service (`is_near`), and filesystems that are not object stores. The daemon's own user
    and root may fetch these resources too.
    """

    def __init__(self, rules: Sequence[AllowRule]) -> None:
        self._rules = tuple(map(_CanonicalRule, rules))

    def __repr__(self) -> str:
        return f"<AllowList of {len(self._rules)} rules>"

    @property
    def far_only(self) -> bool:
        """True if hosts that resolve to near addresses are refused: only rules can allow them."""
        return not self._rules

    def check(self, url: str, peer: Peer) -> None:
        """Check that a user may request a url.

        Raises:
            NotAllowedError: the user may not.
            ConfigError: the url is malformed or deceptive.
        """
        checked(url)
        self._check_rules(url, peer)

    def check_prefix(self, prefix: str, peer: Peer) -> None:
        """Check that a user may list the urls that begin with a prefix. Raises as `check` does."""
        checked(url_with_prefix(prefix))  # a prefix may end in the middle of a name
        self._check_rules(prefix, peer)

    def _check_rules(self, url: str, peer: Peer) -> None:
        """Raise NotAllowedError if the rules do not let a user request a url.

        Args:
            url: a url or prefix that `checked` has accepted.
        """
        if not self._rules:
            _check_default(url, peer)
            return
        canonical_url = canonical(url)
        if not any(rule.covers(canonical_url) and rule.is_for(peer) for rule in self._rules):
            raise NotAllowedError(
                "the daemon's allow rules do not permit you to fetch the url",
                url=url,
            )

    def check_all(self, urls: Iterable[str], peer: Peer) -> None:
        """Check every url as `check` does."""
        # Without rules, trusted users may request anything: only the form of the urls is checked.
        may_request_all = not self._rules and peer.is_trusted
        for url in urls:
            if may_request_all:
                checked(url)
            else:
                self.check(url, peer)

    def may_see(self, url: str, peer: Peer) -> bool:
        """Return whether a user may see that `url` is cached, and evict it.

        Trusted users may, and users who may request the url.
        """
        if peer.is_trusted:
            return True
        try:
            self.check(url, peer)
        except ShardcacheError:
            return False
        return True

    def may_reach(self, prefix: str, peer: Peer) -> bool:
        """Return whether a user may request any url that begins with a canonical prefix."""
        if self.may_see(prefix, peer):
            return True
        return any(rule.is_within(prefix) and rule.is_for(peer) for rule in self._rules)

    def prefixes(self, peer: Peer) -> list[str]:
        """Return the canonical prefixes of the rules that apply to a user."""
        return [prefix for rule in self._rules if rule.is_for(peer) for prefix in rule.prefixes]

    def check_hop(self, source: str, target: str) -> None:
        """Check that everyone who may request a url may also request the url that it leads to.

        The result of the request is cached for all users, so the check does not depend on the user
        who made it.

        Args:
            source: the url that was requested.
            target: the target of a redirect or of a symbolic link.

        Raises NotAllowedError if a user may request only the source, and ConfigError if `target` is
        malformed or deceptive.
        """
        checked(target)
        if self._rules:
            allowed = self._rules_allow_hop(source, target)
        else:
            leads_to_near_host = protocol_of(target) in WEB and is_near(host_of(target))
            # A host may redirect to itself, even a near host: its user was allowed to request it.
            allowed = not leads_to_near_host or host_of(target) == host_of(source)
        if not allowed:
            raise NotAllowedError(
                f"the url leads to {target}, which the daemon is not allowed to fetch",
                url=source,
            )

    def _rules_allow_hop(self, source: str, target: str) -> bool:
        """Return whether the rules allow a target to everyone to whom they allow its source.

        They do if, for each rule that covers the source, one rule that covers the target applies to
        all of its users.
        """
        source_rules = self._covering(canonical(source))
        target_rules = self._covering(canonical(target))
        if not source_rules:
            return False
        return all(
            any(target_rule.is_for_users_of(source_rule) for target_rule in target_rules)
            for source_rule in source_rules
        )

    def _covering(self, url: str) -> list[_CanonicalRule]:
        """Return the rules that cover a canonical url."""
        return [rule for rule in self._rules if rule.covers(url)]


def _check_default(url: str, peer: Peer) -> None:
    """Raise NotAllowedError if only the daemon can reach a url and the peer is not trusted.

    These are the rules that apply if the `allow` setting is empty.
    """
    protocol = protocol_of(url)
    if protocol in STORES or peer.is_trusted:
        return
    if protocol in LOCAL:
        refusal = "local files would be read with the daemon's permissions, not yours"
    elif protocol not in WEB:
        refusal = (
            f"{protocol}:// is not an object store and would be read with the daemon's permissions"
        )
    elif is_near(host_of(url)):
        refusal = "the host is this node or its cloud's metadata service"
    else:
        return
    raise NotAllowedError(refusal, url=url)


def _real(prefix: str) -> str:
    """Return a prefix of local paths with its symbolic links resolved; any other prefix unchanged.

    `check_hop` gets the targets of links in this form.
    """
    protocol, _, path = prefix.partition("://")
    if protocol not in LOCAL:
        return prefix
    if not path.endswith("/") and Path(path).is_dir():
        return f"{protocol}://{_real_folder(path)}"
    # A prefix may end in the middle of a name: only the folder before that name is resolved.
    folder, slash, beginning = path.rpartition("/")
    return f"{protocol}://{_real_folder(folder)}{slash}{beginning}"


def _real_folder(path: str) -> str:
    """Return a folder's path without symbolic links or a final slash; empty for the root."""
    return os.path.realpath(path or "/").rstrip("/")
