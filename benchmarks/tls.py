"""The cost of TLS: small calls and large tensors over TCP, with TLS 1.3 and without.

    python -m benchmarks.tls                # 9 rounds; prints one line of JSON
    python -m benchmarks.tls --rounds 3

Measured as in ``benchmarks.seals``: two pairs of processes take turns, and ratios are computed within a turn.
"""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from benchmarks import seals

__all__ = ["main"]


_NEW = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc"
_COMMANDS = f"""
umask 077
{_NEW} -subj /CN=CA -addext keyUsage=critical,keyCertSign -keyout ca.key -out ca.pem
{_NEW} -subj /CN=worker -extensions usr_cert -CA ca.pem -CAkey ca.key -keyout worker.key -out worker.pem
"""


def _certificates(place: str) -> dict[str, str]:
    """Make a CA and a certificate, and return the variables that name them."""
    subprocess.run(["sh", "-ec", _COMMANDS], cwd=place, capture_output=True, check=True)
    files = {"CERT": "worker.pem", "KEY": "worker.key", "CA": "ca.pem"}
    return {f"ACTORRPC_TLS_{name}": f"{place}/{file}" for name, file in files.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print."""
    rounds = seals.rounds_of(arguments, __doc__)
    with tempfile.TemporaryDirectory() as place:
        # Frame integrity is off for both, so that they differ in TLS only.
        tls = {**_certificates(place), "ACTORRPC_INTEGRITY": "0"}
        report = seals.compare({"plain": {"ACTORRPC_INTEGRITY": "0"}, "tls": tls}, place, rounds)
    print(json.dumps({"openssl": ssl.OPENSSL_VERSION, **report}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
