"""Certificates of a cluster: an authority, and the certificates that it signs for the nodes.

`shardcache cluster certificates` calls `issue`. The files of the authority are ca.pem and ca.key in
a folder of the operator, which has a folder for each node. The module needs the package
cryptography.
"""

import ipaddress
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shardcache.cluster.node_list import Node
from shardcache.cluster.tier_config import MAX_COMMON_NAME, PEER_NAME, Tls
from shardcache.shared.exceptions import ConfigError

_CA_DAYS = 3650
_CLOCK_SKEW = timedelta(hours=1)  # maximum time by which a node's clock may be slow
_SHARED_FOLDER = "shared"  # name of the folder for a certificate that all nodes share
# A node is both a server for other nodes and their client.
_PURPOSES = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
# Key usages (RFC 5280) that the authority's certificate excludes, as it only signs certificates.
_NO_USES = {
    "digital_signature": False,
    "content_commitment": False,
    "key_encipherment": False,
    "data_encipherment": False,
    "key_agreement": False,
    "encipher_only": False,
    "decipher_only": False,
}
_PEM = serialization.Encoding.PEM


@dataclass(frozen=True, slots=True)
class IssuedCertificate:
    """A new certificate.

    Attributes:
        node: name of the certificate's node; `PEER_NAME` if the certificate is for all nodes.
        folder: folder with node.pem, node.key and ca.pem, which have to be copied to the node.
        expires: time at which the certificate expires.
    """

    node: str
    folder: Path
    expires: datetime


def issue(nodes: Sequence[Node] | None, folder: Path, days: int) -> list[IssuedCertificate]:
    """Write a certificate for each node to a folder of its name, signed by the cluster's authority.

    The authority, ca.pem and ca.key, is created if neither exists.

    Args:
        nodes: the nodes; None for one certificate for all nodes, in the folder `shared`.
        folder: folder of the authority, in which the nodes' folders are created.
        days: number of days for which the certificates are valid; they end with the authority's
            certificate at the latest.

    Raises ConfigError.
    """
    try:
        authority = _Authority(folder)
        if nodes is None:
            return [authority.issue(PEER_NAME, folder / _SHARED_FOLDER, days)]
        return [
            authority.issue(node.name, folder / node.name, days, node.address) for node in nodes
        ]
    except OSError as exn:
        raise ConfigError(
            f"cannot write {exn.filename}: {exn.strerror}",
            remedy="choose another --out",
        ) from None


def expiry_s(tls: Tls) -> float:
    """Return when a node's certificate or its authority's expires, in seconds since the epoch.

    The earlier of both times counts. Raises OSError and ValueError.
    """
    node_expiry = min(_expiries(tls.certificate))
    # While nodes change to a new authority, the file has the previous one, too. Only the authority
    # that expires last counts.
    authority_expiry = max(_expiries(tls.ca))
    return min(node_expiry, authority_expiry).timestamp()


def _expiries(file: Path) -> list[datetime]:
    """Return when each certificate in a PEM file expires. Raises OSError, ValueError."""
    certificates = x509.load_pem_x509_certificates(file.read_bytes())
    return [certificate.not_valid_after_utc for certificate in certificates]


class _Authority:
    """The authority of one cluster: loaded from a folder, or created there if it is missing.

    Raises ConfigError if its files cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        file = folder / "ca.pem"
        key_file = folder / "ca.key"
        # If only one of the files exists, it is loaded, which fails: a new authority would replace
        # that file.
        if file.exists() or key_file.exists():
            self._certificate, self._key = _load(file, key_file)
        else:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._certificate, self._key = _create(file, key_file)

    def issue(
        self,
        name: str,
        folder: Path,
        days: int,
        address: str | None = None,
    ) -> IssuedCertificate:
        """Write a new certificate and key for a node, with the authority's certificate.

        Args:
            name: name in the certificate.
            folder: folder for the three files.
            days: number of days for which the certificate is valid.
            address: IP address of the node, which the certificate names as well; None for a
                certificate that all nodes share.

        Raises OSError.
        """
        names: list[x509.GeneralName] = [x509.DNSName(name)]
        if address is not None:
            names.append(x509.IPAddress(ipaddress.ip_address(address)))
        key = ec.generate_private_key(ec.SECP256R1())
        requested = datetime.now(UTC) + timedelta(days=days)
        expires = min(requested, self._certificate.not_valid_after_utc)
        basics = x509.BasicConstraints(ca=False, path_length=None)
        certificate = (
            _certificate_builder(_subject(name), self._certificate.subject, key, expires)
            .add_extension(basics, critical=True)
            .add_extension(x509.ExtendedKeyUsage(_PURPOSES), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write_key(folder / "node.key", key)
        _write(folder / "node.pem", certificate.public_bytes(_PEM))
        _write(folder / "ca.pem", self._certificate.public_bytes(_PEM))
        return IssuedCertificate(name, folder, expires)


def _certificate_builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    expires: datetime,
) -> x509.CertificateBuilder:
    """Return a builder with the common parts of an authority's and a node's certificate."""
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - _CLOCK_SKEW)
        .not_valid_after(expires)
    )


def _create(file: Path, key_file: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Write the files of a new authority; return its certificate and key. Raises OSError."""
    key = ec.generate_private_key(ec.SECP256R1())
    # While nodes change from one authority to the next, they trust both. Each authority has a name
    # of its own, by which TLS tells them apart.
    name = _subject(f"shardcache tier authority {secrets.token_hex(4)}")
    expires = datetime.now(UTC) + timedelta(days=_CA_DAYS)
    basics = x509.BasicConstraints(ca=True, path_length=0)
    usage = x509.KeyUsage(**_NO_USES, key_cert_sign=True, crl_sign=True)
    certificate = (
        _certificate_builder(name, name, key, expires)
        .add_extension(basics, critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA256())
    )
    _write_key(key_file, key)
    _write(file, certificate.public_bytes(_PEM))
    return certificate, key


def _load(file: Path, key_file: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Return an authority's certificate and key, from its files. Raises ConfigError."""
    remedy = (
        "restore both files of the authority, "
        "or create a new authority in another folder with --out"
    )
    try:
        certificate = x509.load_pem_x509_certificate(file.read_bytes())
        key = serialization.load_pem_private_key(key_file.read_bytes(), password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise TypeError("the key is not one of an elliptic curve")
        if key.public_key() != certificate.public_key():
            raise ValueError("the key is not that of the certificate")
    except (OSError, ValueError, TypeError) as exn:
        raise ConfigError(
            f"the authority cannot be used: {exn}",
            url=str(file),
            remedy=remedy,
        ) from None
    if certificate.not_valid_after_utc <= datetime.now(UTC):
        raise ConfigError("the authority has expired", url=str(file), remedy=remedy)
    return certificate, key


def _subject(common_name: str) -> x509.Name:
    """Return a certificate's subject with a name, cut to the length that is allowed."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:MAX_COMMON_NAME])])


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    unencrypted = serialization.NoEncryption()
    data = key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, unencrypted)
    _write(path, data, mode=0o600)


def _write(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace a file atomically, as nginx may be reading it."""
    new_path = path.with_name(f".{path.name}.new")
    new_path.unlink(missing_ok=True)
    with open(os.open(new_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
    new_path.replace(path)
