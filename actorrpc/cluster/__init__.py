"""Clusters: worker processes for actors, on this machine without a daemon, and on others that join or are started there.

``with actorrpc.init(): ...`` is all that most programs need of it.
"""

from actorrpc.cluster.engine import Engine, LaunchedEngine, Node, Order
from actorrpc.cluster.local import Context, init
from actorrpc.cluster.scaling import drain, scale

__all__ = ["Context", "Engine", "LaunchedEngine", "Node", "Order", "drain", "init", "scale"]
