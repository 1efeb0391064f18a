"""The list of a cluster's nodes: their names, and the addresses for traffic between them.

`parse` reads the text of the option `--nodes`, or of the file that the option names. An item of the
text may have ranges, such as `node[1-8]`. It expands to entries, each of which is the text for one
node. The owner of a part, which is a range of an object, is the node that fetches and caches it.
"""

import ipaddress
import re
import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from braceexpand import braceexpand

from shardcache.shared.exceptions import ConfigError

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
_RANGES = re.compile(r"\[([0-9,-]+)\]")  # ranges as Slurm writes them, such as [1-8,12]
_RANGE = re.compile(r"([0-9]+)-([0-9]+)")
# An item of the list ends at a comma or white space outside of braces and brackets.
_ITEM = re.compile(r"(?:[^\s,{}\[\]]|\{[^{}]*\}|\[[^\[\]]*\])+")
_SEPARATORS = re.compile(r"[\s,]*")
_MAX_NODES = 4096


@dataclass(frozen=True, slots=True)
class Node:
    """One node.

    Attributes:
        name: name of the node in reports, and in the paths of its files.
        address: IP address by which the other nodes reach the node.
    """

    name: str
    address: str

    @property
    def is_loopback(self) -> bool:
        """True if the address reaches only this machine."""
        return ipaddress.ip_address(self.address).is_loopback

    def at(self, port: int) -> str:
        """Return HOST:PORT for a port of the node."""
        if ":" in self.address:
            return f"[{self.address}]:{port}"
        return f"{self.address}:{port}"


def parse(text: str) -> tuple[Node, ...]:
    """Return the nodes of a list, in its order.

    A name without an address in the list is resolved. The addresses have to be the same in the
    configuration of all nodes, as they decide which node owns which part.

    Args:
        text: NAME, ADDRESS or NAME=ADDRESS, separated by commas or white space, with ranges as in
            Slurm, `node[1-8]`, or as in a shell, `node{1..8}`. A comment begins with `#` and ends
            with the line.

    Raises ConfigError.
    """
    nodes = tuple(_parse_node(entry) for entry in _entries(text))
    if not nodes:
        raise ConfigError(
            "the list of nodes is empty",
            remedy="write --nodes node1,node2 or --nodes FILE",
        )
    if len(nodes) > _MAX_NODES:
        raise ConfigError(
            f"the list has {len(nodes):,} nodes, more than {_MAX_NODES:,}",
            remedy="list fewer nodes",
        )
    _check_unique("name", [node.name for node in nodes])
    _check_unique("address", [node.address for node in nodes])
    _check_reachable(nodes)
    return nodes


def _check_unique(attribute: str, values: list[str]) -> None:
    """Raise ConfigError if a value occurs twice.

    Args:
        attribute: "name" or "address".
        values: the value of each node.
    """
    for value, count in Counter(values).items():
        if count > 1:
            raise ConfigError(
                f"the list of nodes has the {attribute} {value} twice",
                remedy="list each node once",
            )


def _check_reachable(nodes: tuple[Node, ...]) -> None:
    """Raise ConfigError if the nodes cannot reach each other, as only some have loopback addresses.

    If all have loopback addresses, the cluster is a test on one machine.
    """
    local_nodes = [node for node in nodes if node.is_loopback]
    are_all_local = len(local_nodes) == len(nodes)
    if local_nodes and not are_all_local:
        local = local_nodes[0]
        raise ConfigError(
            f"{local.name} has the loopback address {local.address} here, which no other node can "
            "reach",
            remedy=f"write {local.name}=ADDRESS with the address that other nodes connect to",
        )


def _entries(text: str) -> Iterator[str]:
    """Yield the entries of a list, one per node, with comments removed and ranges expanded.

    Raises ConfigError.
    """
    for line in text.splitlines():
        items, _, _comment = line.partition("#")
        between_items = _ITEM.sub("", items)
        if not _SEPARATORS.fullmatch(between_items):
            raise ConfigError(
                f"{items.strip()!r} has braces or brackets that are unbalanced or nested",
                remedy="write node{1..8} or node[1-8]",
            )
        for item in _ITEM.findall(items):
            yield from _expand(item)


def _expand(item: str) -> Iterator[str]:
    """Yield the entries of an item, which may have ranges. Raises ConfigError."""
    pattern = _RANGES.sub(_braces, item)
    try:
        for number, entry in enumerate(braceexpand(pattern)):
            if number == _MAX_NODES:
                raise ConfigError(
                    f"{item!r} stands for more than {_MAX_NODES:,} nodes",
                    remedy="list fewer nodes",
                )
            yield entry
    except ValueError:
        raise ConfigError(
            f"{item!r} has unbalanced braces",
            remedy="write node{1..8} or node[1-8]",
        ) from None


def _braces(ranges: re.Match[str]) -> str:
    """Return Slurm's ranges, such as `[1-8,12]`, as a shell writes them: `{{1..8},12}`."""
    braces = [_RANGE.sub(r"{\1..\2}", text) for text in ranges[1].split(",")]
    if len(braces) == 1:
        return braces[0]
    return "{" + ",".join(braces) + "}"


def _parse_node(entry: str) -> Node:
    """Parse an entry, and resolve its name if it has no address. Raises ConfigError."""
    name, equals, address = entry.partition("=")
    if not _NAME.fullmatch(name) and not is_address(name):
        raise ConfigError(f"{entry!r} is not a node", remedy="write NAME, ADDRESS or NAME=ADDRESS")
    if equals and not is_address(address):
        raise ConfigError(
            f"{address!r} is not an IP address",
            remedy=f"write {name}=ADDRESS, such as {name}=10.0.0.1",
        )
    if not equals:
        address = _resolve(name)
    return Node(name, str(ipaddress.ip_address(address)))


def is_address(text: str) -> bool:
    """Return True for an IP address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _resolve(name: str) -> str:
    """Return the IP address of a name; the same each time if it has several. Raises ConfigError."""
    if is_address(name):
        return name
    try:
        records = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as exn:
        raise ConfigError(
            f"the node {name} has no address: {exn.strerror}",
            remedy=f"write {name}=ADDRESS, or take the node off the list",
        ) from None
    addresses: set[str] = set()
    for *_, socket_address in records:
        host, *_ = socket_address
        addresses.add(str(host))
    return min(addresses, key=_preference)


def _preference(address: str) -> tuple[bool, str]:
    """Return the key by which addresses are ordered: IPv4 first, then by text."""
    return ":" in address, address
