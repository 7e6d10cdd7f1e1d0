"""What TLS costs: small calls and large tensors over TCP, with TLS 1.3 and without.

    python -m benchmarks.tls                # 9 rounds; prints one line of JSON
    python -m benchmarks.tls --rounds 3

Measured as in ``benchmarks.seals``: two pairs of processes take turns, and ratios are taken within a turn.
"""

from __future__ import annotations

import json
import ssl
import sys
import tempfile
from collections.abc import Sequence

from actorrpc.testing.certificates import temporary_certificates
from benchmarks import seals

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print."""
    rounds = seals.rounds_of(arguments, __doc__)
    with tempfile.TemporaryDirectory() as place:
        # Neither is sealed: what TLS costs is all that differs.
        tls = {**temporary_certificates(place).environment, "ACTORRPC_INTEGRITY": "0"}
        report = seals.compare({"plain": {"ACTORRPC_INTEGRITY": "0"}, "tls": tls}, place, rounds)
    print(json.dumps({"openssl": ssl.OPENSSL_VERSION, **report}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
