"""One program for every way of starting it: alone, torchrun, Slurm, MPI, Kubernetes, or workers that join by hand.

Actors throw darts, the driver counts them. Under a launcher, rank 0 is the driver and the other ranks serve inside
``actorrpc.init()`` until it is done. Nothing in the program says where anything runs.

    python pi.py                                      # this machine
    ./torchrun.sh                                     # torchrun, on one or more hosts
    python pi.py --listen tcp://10.0.0.5:7777         # and: python -m actorrpc.worker --join tcp://10.0.0.5:7777
"""

from __future__ import annotations

import argparse

import torch

import actorrpc


@actorrpc.remote
class Thrower:
    """Throws darts at a square and counts those within the circle."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def throw(self, darts: int) -> int:
        """Return how many of the darts hit the circle."""
        where = torch.rand(2, darts, generator=self.generator)
        return int((where.square().sum(0) <= 1).sum())


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--listen", help="where workers may join, tcp://HOST:PORT")
    parser.add_argument("--throwers", type=int, default=4)
    parser.add_argument("--darts", type=int, default=1_000_000, help="of each thrower")
    given = parser.parse_args()
    with actorrpc.init(listen=given.listen):
        throwers = [Thrower.options(spread=True).remote(seed) for seed in range(given.throwers)]
        hits = sum(actorrpc.get([each.throw.remote(given.darts) for each in throwers]))
        print(f"pi is about {4 * hits / (given.throwers * given.darts):.4f}")


if __name__ == "__main__":
    main()
