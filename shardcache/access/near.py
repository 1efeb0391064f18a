"""Near hosts, reachable only from this node: the node itself and its cloud's metadata services.

A daemon that fetches for other users must not send their requests to near hosts. The metadata
service hands out the machine's credentials, and services on the loopback interface trust every
client as a local user.
"""

import ipaddress
import socket
from contextlib import suppress
from functools import lru_cache

_METADATA = tuple(
    ipaddress.ip_network(network)
    for network in (
        # 169.254.169.254, which most clouds use, is missing: all link-local addresses are near.
        "168.63.129.16",  # Azure
        "100.100.100.200",  # Alibaba
        "fd00:100::100:200",  # Alibaba
        "fd00:ec2::/32",  # AWS: instance metadata, and the credentials of EKS pods
        "fd20:ce::254",  # Google
        "192.0.0.192",  # Oracle
        "fd00:c1::a9fe:a9fe",  # Oracle
        "fd00:42::42",  # Scaleway
        "fd00:a9fe:a9fe::1",  # Akamai
    )
)
# Names that are refused before they are resolved, as a proxy might resolve them instead of the
# daemon. The addresses of other names are checked when the daemon resolves them
# (`transport.http.sockets`).
_NAMES = frozenset(
    {
        "localhost",
        "localhost.localdomain",
        "localhost4",
        "localhost6",
        "ip6-localhost",
        "ip6-loopback",
        "metadata",
        "metadata.google.internal",
        "instance-data",
        "instance-data.ec2.internal",
    }
)
_DOMAINS = (".localhost", ".docker.internal")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # the last 32 bits are an IPv4 address
_THIS_NETWORK = ipaddress.ip_network("0.0.0.0/8")  # all of these addresses reach the node itself


@lru_cache(maxsize=1024)
def is_near(host: str) -> bool:
    """Return whether a host is this node or its cloud's metadata service.

    Args:
        host: a name, or an address in any notation. A name is compared with known names only: it
            is not resolved.
    """
    name = host.lower().rstrip(".")
    address = _address(name)
    if address is not None:
        return _is_near_address(address)
    return name in _NAMES or name.endswith(_DOMAINS)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address that a host states, in any notation; None for a name."""
    without_zone, _, _ = host.partition("%")  # as in fe80::1%eth0
    with suppress(ValueError):
        return ipaddress.ip_address(without_zone)
    with suppress(OSError, ValueError):
        return ipaddress.IPv4Address(socket.inet_aton(host))  # 127.1, 0x7f000001, 2130706433
    return None


def _is_near_address(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Return whether packets for an address reach this node or a metadata service."""
    if isinstance(address, ipaddress.IPv6Address):
        embedded = _embedded_ipv4(address)
        if embedded is not None:
            return _is_near_address(embedded)
    elif address in _THIS_NETWORK:
        return True
    return (
        address.is_loopback
        or address.is_link_local
        or address.is_multicast
        or address.is_unspecified
        or any(address in network for network in _METADATA)
    )


def _embedded_ipv4(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """Return the IPv4 address that an IPv6 address stands for; None if it stands for none."""
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour
