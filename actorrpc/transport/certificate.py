"""A self-signed certificate for the accepting side of TLS connections; see :mod:`actorrpc.transport.tls`.

Imported only by processes that accept TCP connections, because the import of ``cryptography`` takes time.
"""

from __future__ import annotations

import datetime

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

__all__ = ["make"]


def make() -> tuple[bytes, bytes]:
    """Return a new certificate (DER), and the certificate with its private key (PEM).

    No worker verifies the certificate, so its name and times have no meaning.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "actorrpc")])
    first, last = datetime.datetime(2000, 1, 1), datetime.datetime(9999, 12, 31)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), first, last)
    made = builder.sign(key, SHA256())
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return made.public_bytes(Encoding.DER), secret + made.public_bytes(Encoding.PEM)
