"""The embedded local cluster: worker processes for actors, on this machine, without a daemon.

``with actorrpc.init(): ...`` is all that most programs need of it.
"""

from actorrpc.cluster.local import Context, init

__all__ = ["Context", "init"]
