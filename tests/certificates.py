"""Certificates for tests, made once in each session, and the switch with which the whole suite uses them.

    ACTORRPC_TEST_TLS=1 pytest tests/rpc tests/autograd       # forced TCP, with certificates

Then every worker that a test starts has the certificates in its environment. Tests that create agents pass them ``OPTIONS``.
"""

from __future__ import annotations

import datetime
import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from actorrpc.testing import processes

__all__ = ["OPTIONS", "OVER_TLS", "Certificates", "files", "foreign", "switch_on", "temporary_certificates"]

OVER_TLS = os.environ.get("ACTORRPC_TEST_TLS") == "1"
OPTIONS: dict[str, Any] = {}
"""Settings that tests pass to agents which they create in the test process; empty without the switch."""
_EARLIER = datetime.timedelta(minutes=5)  # tolerates clocks that differ


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """Paths of the PEM files for one worker.

    Attributes:
        cert: the worker's certificate.
        key: its private key, mode 0600.
        ca: the CA's certificate.
        ca_key: the CA's private key, mode 0600; workers do not need it.
    """

    cert: str
    key: str
    ca: str
    ca_key: str

    @property
    def options(self) -> dict[str, str]:
        """Keywords for the options of ``init_rpc``, which name these files."""
        return {"tls_cert": self.cert, "tls_key": self.key, "tls_ca": self.ca}

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that name these files."""
        return {f"ACTORRPC_{name.upper()}": path for name, path in self.options.items()}


@functools.cache
def files() -> Certificates:
    """Return the certificates of the workers."""
    return temporary_certificates(processes.scratch() / "certificates")


@functools.cache
def foreign() -> Certificates:
    """Return certificates of another CA, which the workers do not trust."""
    return temporary_certificates(processes.scratch() / "foreign")


def switch_on() -> None:
    """Make all workers that start from now on use TCP and these certificates."""
    OPTIONS.update(files().options)
    os.environ.update({**files().environment, "ACTORRPC_TRANSPORT": "tcp"})


def temporary_certificates(
    directory: Path, *, name: str = "worker", days: float = 90.0, authority: Certificates | None = None
) -> Certificates:
    """Make a CA and a worker's certificate; return the paths of the files.

    Args:
        directory: where the files are written. A missing directory is made.
        name: the name of the worker's files and the name in its certificate.
        days: how long the certificates are valid from now on; a negative number makes expired certificates.
        authority: earlier certificates whose CA signs, instead of a new CA.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.UTC)
    until = now + datetime.timedelta(days=days)
    since = min(now, until) - _EARLIER
    if authority is None:
        ca_path, ca_key_path = directory / "ca.pem", directory / "ca.key"
        ca_key: Any = ec.generate_private_key(ec.SECP256R1())
        # A random name: if two CAs had the same name, OpenSSL would report a bad signature instead of an unknown CA.
        issuer = _named(f"CA {os.urandom(8).hex()}")
        _write_key(ca_key_path, ca_key)
        ca_path.write_bytes(_signed(issuer, ca_key, issuer, ca_key, since, until + _EARLIER, is_ca=True))
    else:
        ca_path, ca_key_path = Path(authority.ca), Path(authority.ca_key)
        ca_key = serialization.load_pem_private_key(ca_key_path.read_bytes(), None)
        issuer = x509.load_pem_x509_certificate(ca_path.read_bytes()).subject
    key = ec.generate_private_key(ec.SECP256R1())
    cert_path, key_path = directory / f"{name}.pem", directory / f"{name}.key"
    _write_key(key_path, key)
    cert_path.write_bytes(_signed(_named(name), key, issuer, ca_key, since, until, is_ca=False))
    return Certificates(cert=str(cert_path), key=str(key_path), ca=str(ca_path), ca_key=str(ca_key_path))


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _signed(
    subject: x509.Name,
    key: Any,
    issuer: x509.Name,
    ca_key: Any,
    since: datetime.datetime,
    until: datetime.datetime,
    *,
    is_ca: bool,
) -> bytes:
    usages = ("digital_signature", "key_cert_sign", "crl_sign") if is_ca else ("digital_signature",)
    every = (
        *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
        *("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
    )
    extensions: list[tuple[x509.ExtensionType, bool]] = [
        (x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None), True),
        (x509.KeyUsage(**{usage: usage in usages for usage in every}), True),
        (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), False),
    ]
    if not is_ca:
        # Each worker is client as well as server.
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        extensions.append((x509.ExtendedKeyUsage(both), False))
    number = x509.random_serial_number()
    builder = x509.CertificateBuilder(issuer, subject, key.public_key(), number, since, until)
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical)
    return builder.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _write_key(path: Path, key: Any) -> None:
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
