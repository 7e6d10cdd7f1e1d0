"""One rank of one test in a fresh process: ``python -m tests.conformance.rank TEST RANK FILE SECONDS``."""

import sys

from tests.conformance import suite

if __name__ == "__main__":
    suite.run_rank(sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
