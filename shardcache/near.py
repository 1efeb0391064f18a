"""Near hosts, reachable only from this node: the node itself and its cloud's metadata services.

A daemon that fetches for others must not send requests to them on its own behalf: instance metadata hands out the
machine's credentials, and services on the loopback interface trust every client as a local user.
"""

import ipaddress
import socket
from contextlib import suppress
from functools import lru_cache

# In addition to 169.254.169.254, which is link-local: Azure's, Alibaba's, and those of AWS and Google on IPv6.
_METADATA = frozenset(map(ipaddress.ip_address, ("168.63.129.16", "100.100.100.200", "fd00:ec2::254", "fd20:ce::254")))
# Names that a proxy might resolve on our behalf; other names are judged by the addresses that they resolve to.
_NAMES = frozenset(
    {"localhost", "localhost.localdomain", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback"}
    | {"metadata", "metadata.google.internal", "instance-data", "instance-data.ec2.internal"}
)
_DOMAINS = (".localhost", ".docker.internal")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


@lru_cache(maxsize=1024)
def is_near(host: str) -> bool:
    """Return whether a host, by name or address in any notation, is this node or its cloud's metadata service."""
    name = host.lower().rstrip(".")
    address = _address(name)
    return _is_near(address) if address is not None else name in _NAMES or name.endswith(_DOMAINS)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    with suppress(ValueError):
        return ipaddress.ip_address(host.partition("%")[0])
    with suppress(OSError, ValueError):
        return ipaddress.IPv4Address(socket.inet_aton(host))  # 127.1, 0x7f000001, 2130706433
    return None


def _is_near(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        nat64 = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF) if address in _NAT64 else None
        within = address.ipv4_mapped or address.sixtofour or nat64
        if within is not None:
            return _is_near(within)
    this_network = address.version == 4 and int(address) >> 24 == 0
    return (
        address.is_loopback or address.is_link_local or address.is_multicast or this_network
        or address.is_unspecified or address in _METADATA
    )  # fmt: skip
