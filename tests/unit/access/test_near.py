"""access/near.py: which hosts are this node or its cloud's metadata service, in any spelling."""

import pytest

from shardcache.access.near import is_near


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.9.9.9",
        "127.1",
        "2130706433",
        "0x7f000001",
        "0177.0.0.1",
        "0.0.0.0",
        "0",
        "localhost",
        "LOCALHOST",
        "localhost.",
        "a.localhost",
        "a.docker.internal",
        "ip6-loopback",
        "::1",
        "::",
        "::ffff:127.0.0.1",
        "2002:7f00:1::",
        "fe80::1",
        "fe80::1%eth0",
        "ff02::1",
        "224.0.0.1",
        "169.254.169.254",
        "2852039166",
        "::ffff:169.254.169.254",
        "64:ff9b::a9fe:a9fe",
        "fd00:ec2::254",
        "168.63.129.16",
        "100.100.100.200",
        "fd20:ce::254",
        "metadata",
        "metadata.google.internal",
        "fd00:ec2::23",
        "fd00:c1::a9fe:a9fe",
        "192.0.0.192",
        "fd00:42::42",
        "fd00:a9fe:a9fe::1",
        "fd00:100::100:200",
    ],
)
def test_host_of_this_node_or_of_its_metadata_is_near(host: str) -> None:
    """Addresses are near as the resolver takes them, and so are names a proxy may resolve."""
    assert is_near(host)


@pytest.mark.parametrize(
    "host",
    [
        "example.com",
        "10.1.2.3",
        "192.168.1.5",
        "172.16.0.1",
        "2606:4700::1111",
        "fd00::1",
        "minio",
        "nas.local",
        "ip-10-0-0-5.ec2.internal",
        "files.localdomain",
        "notlocalhost",
        "localhost.example.com",
        "metadata.example.com",
        "169.254.169.254.nip.io",
        "64:ff9b::a01:203",
        "2002:a01:203::",
        "",
        "999.1.1.1",
        "fd00:ec3::254",
        "192.0.0.193",
    ],
)
def test_other_host_is_not_near(host: str) -> None:
    """A file server in the cluster's network is not near, nor is a name that looks so."""
    assert not is_near(host)
