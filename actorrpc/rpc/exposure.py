"""What a data-only worker lets its peers do: :func:`exposed`, :func:`allow` and :class:`Named`, for users.

A group is joined with ``data_only=True`` (or ``ACTORRPC_DATA_ONLY=1``); from then on its peers may send data and call
exposed functions, by ``rpc_sync``, ``rpc_async`` and ``remote``, and fetch what ``remote`` has made. Methods of what
an RRef refers to, functions by value, actors and distributed autograd are refused: all of these let a peer choose
what runs. This module also lets in what these calls and ``shutdown`` themselves need.
"""

from __future__ import annotations

from actorrpc.core.restriction import Named, allow, exposed, permit_function, permit_maker
from actorrpc.rpc import group, rref
from actorrpc.rpc.fork_messages import ForkId, RRefId

__all__ = ["Named", "allow", "exposed"]

for _function in (group._arrive, rref._create, rref._fetch):
    permit_function(_function)
permit_maker(rref._rebuild)
for _class in (RRefId, ForkId):
    allow(_class)
