"""Clusters: worker processes for actors, on this machine without a daemon, and on others that join or are started there.

``with actorrpc.init(): ...`` is all that most programs need of it.
"""

from actorrpc.cluster.api import ClusterContext, drain, init, scale
from actorrpc.cluster.provisioners.base import Engine, LaunchedEngine, LaunchRequest, Node
from actorrpc.cluster.resources import available_resources, cluster_resources, nodes

__all__ = [
    "ClusterContext",
    "Engine",
    "LaunchRequest",
    "LaunchedEngine",
    "Node",
    "available_resources",
    "cluster_resources",
    "drain",
    "init",
    "nodes",
    "scale",
]
