"""Temporary certificates for tests and for trying out TLS: a CA, and certificates of workers.

    files = certificates.temporary_certificates("/dev/shm/certificates")
    rpc.init_rpc("worker0", rank=0, world_size=2,
                 rpc_backend_options=rpc.TensorPipeRpcBackendOptions(transport="tcp", **files.options))

For processes that are configured by environment variables, run ``eval "$(python -m actorrpc.testing.certificates DIRECTORY)"``.
All workers may share the certificate, or each worker gets its own: pass ``authority=``. This module needs the package
`cryptography`, which the extra `tls` installs. Workers do not need it: they use Python's ``ssl``.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from actorrpc.errors import ConfigError

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as _error:
    _missing: ImportError | None = _error
else:
    _missing = None

__all__ = ["Certificates", "temporary_certificates"]

_EARLIER: Final = datetime.timedelta(minutes=5)  # tolerates clocks that differ
_ORGANISATION: Final = "actorrpc, temporary"


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


def temporary_certificates(
    directory: str | os.PathLike[str],
    *,
    name: str = "worker",
    days: float = 7.0,
    authority: Certificates | None = None,
) -> Certificates:
    """Make a CA and a worker's certificate; return the paths of the files.

    Args:
        directory: where the files are written. A missing directory is made, with access for this user only. Existing files
            are replaced.
        name: the name of the worker's files and the name in its certificate.
        days: how long the certificates are valid from now on; a negative number makes expired certificates.
        authority: earlier certificates whose CA signs, instead of a new CA.

    Raises:
        ConfigError: `cryptography` is not installed, or the name cannot be used.
        OSError: the files cannot be written or read.
    """
    if _missing is not None:
        raise ConfigError(
            f"temporary certificates need the package cryptography ({_missing}): pip install 'actorrpc[tls]'"
        )
    if not name or os.path.basename(name) != name or len(name) > 60:
        raise ConfigError(f"name must be the name of a file of at most 60 characters, not {name!r}")
    os.makedirs(directory, mode=0o700, exist_ok=True)
    now = datetime.datetime.now(datetime.UTC)
    until = now + datetime.timedelta(days=days)
    since = min(now, until) - _EARLIER
    if authority is None:
        ca_path, ca_key_path = os.path.join(directory, "ca.pem"), os.path.join(directory, "ca.key")
        ca_key: Any = ec.generate_private_key(ec.SECP256R1())
        # A random name: if two CAs had the same name, OpenSSL would report a bad signature instead of an unknown CA.
        issuer = _named(f"CA {os.urandom(8).hex()}")
        ca = _sign(issuer, ca_key.public_key(), issuer, ca_key, since, until + _EARLIER, is_ca=True)
        _write(ca_key_path, _private(ca_key), private=True)
        _write(ca_path, ca.public_bytes(serialization.Encoding.PEM))
    else:
        ca_path, ca_key_path = authority.ca, authority.ca_key
        with open(ca_key_path, "rb") as file:
            ca_key = serialization.load_pem_private_key(file.read(), None)
        with open(ca_path, "rb") as file:
            issuer = x509.load_pem_x509_certificate(file.read()).subject
    key = ec.generate_private_key(ec.SECP256R1())
    cert = _sign(_named(name), key.public_key(), issuer, ca_key, since, until, is_ca=False)
    made = Certificates(
        cert=os.path.join(directory, f"{name}.pem"),
        key=os.path.join(directory, f"{name}.key"),
        ca=ca_path,
        ca_key=ca_key_path,
    )
    _write(made.key, _private(key), private=True)
    _write(made.cert, cert.public_bytes(serialization.Encoding.PEM))
    return made


def _named(name: str) -> Any:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, _ORGANISATION),
            x509.NameAttribute(NameOID.COMMON_NAME, name),
        ]
    )


def _sign(
    subject: Any,
    public: Any,
    issuer: Any,
    ca_key: Any,
    since: datetime.datetime,
    until: datetime.datetime,
    *,
    is_ca: bool,
) -> Any:
    usages = ("digital_signature", "key_cert_sign", "crl_sign") if is_ca else ("digital_signature",)
    every = (
        *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
        *("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
    )
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(since)
        .not_valid_after(until)
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None), critical=True)
        .add_extension(x509.KeyUsage(**{usage: usage in usages for usage in every}), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
        )
    )
    if not is_ca:
        # Each worker is client as well as server.
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(both), critical=False)
    return builder.sign(ca_key, hashes.SHA256())


def _private(key: Any) -> bytes:
    data: bytes = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return data


def _write(path: str, data: bytes, private: bool = False) -> None:
    """Replace a file, so that the data is never written into an existing file with other permissions."""
    temporary = f"{path}.{os.getpid()}"
    fd = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600 if private else 0o644
    )
    with open(fd, "wb") as file:
        file.write(data)
    os.replace(temporary, path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make certificates in a directory, and print shell commands that set the variables which name them."""
    parser = argparse.ArgumentParser(prog="python -m actorrpc.testing.certificates", description=main.__doc__)
    parser.add_argument("directory", help="where the files are written")
    parser.add_argument("--name", default="worker", help="name of the worker's files (%(default)s)")
    parser.add_argument(
        "--days", type=float, default=7.0, help="how long the certificates are valid (%(default)s days)"
    )
    given = parser.parse_args(arguments)
    try:
        made = temporary_certificates(os.path.abspath(given.directory), name=given.name, days=given.days)
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    for variable, path in made.environment.items():
        sys.stdout.write(f"export {variable}={shlex.quote(path)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
