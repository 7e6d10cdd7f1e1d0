"""Clusters: worker processes for actors, on this machine without a daemon, and on other machines that join or are started there.

Most programs only need ``with actorrpc.init(): ...``.
"""

from actorrpc.cluster.api import ClusterContext, init
from actorrpc.cluster.draining import drain
from actorrpc.cluster.provisioners.base import Engine, LaunchedEngine, LaunchRequest, Node
from actorrpc.cluster.resources import available_resources, cluster_resources, nodes, scale

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
