"""Clusters: worker processes for actors, on this machine without a daemon, and on others that join or are started there.

``with actorrpc.init(): ...`` is all that most programs need of it.
"""

from actorrpc.cluster.api import Context, drain, init, scale
from actorrpc.cluster.provisioners.base import Engine, LaunchedEngine, Node, Order

__all__ = ["Context", "Engine", "LaunchedEngine", "Node", "Order", "drain", "init", "scale"]
