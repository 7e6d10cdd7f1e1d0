"""``torch.distributed.rpc.internal``: torch's pickler, which keeps tensors apart, and names for profiles.

Messages of actorrpc are packed by its own codec. This pickler is for programs that call it, or replace it with
:func:`actorrpc.compat.rpc.api._use_rpc_pickler`.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections import ChainMap
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import torch

from actorrpc.compat.rpc.references import RRef
from actorrpc.serialization.reducers import SCRIPT_REDUCERS

__all__ = ["PythonUDF", "RPCExecMode", "deserialize", "serialize"]

_Reducer = Callable[[Any], Any]


class RPCExecMode(Enum):
    """How a call is made."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


class PythonUDF(NamedTuple):
    """A function and its arguments."""

    func: Any
    args: Any
    kwargs: Any


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) is not torch.Tensor:
            return None
        self._tensors.append(obj)
        return len(self._tensors) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, index: Any) -> Any:
        return self._tensors[index]


class _InternalRPCPickler:
    """Packs an object into bytes and a list of its tensors. Thread-safe."""

    def __init__(self) -> None:
        self._class_reducer_dict: dict[type, _Reducer] = {}
        self._own: dict[type, _Reducer] = {RRef: RRef._reduce, **SCRIPT_REDUCERS}

    def _register_reducer(self, obj_class: type, reducer: _Reducer) -> None:
        """Set the function that reduces objects of a class, unless the class has one."""
        self._class_reducer_dict.setdefault(obj_class, reducer)

    def serialize(self, obj: Any) -> tuple[bytes, list[torch.Tensor]]:
        """Return the object's bytes and its tensors."""
        file = io.BytesIO()
        tensors: list[torch.Tensor] = []
        pickler = _Pickler(file, tensors)
        table: Any = ChainMap(self._class_reducer_dict, self._own, copyreg.dispatch_table)
        pickler.dispatch_table = table
        pickler.dump(obj)
        return file.getvalue(), tensors

    def deserialize(self, binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
        """Return the object; if its class or function does not exist here, return an AttributeError instead."""
        try:
            return _Unpickler(io.BytesIO(binary_data), tensor_table).load()
        except AttributeError as error:
            unknown = AttributeError(
                f"{error} Default RPC pickler does not serialize function code. Ensure that UDFs are defined on both "
                f"caller and callee modules."
            )
            unknown.__cause__ = error
            return unknown


_internal_rpc_pickler = _InternalRPCPickler()


def serialize(obj: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Pack an object into bytes and a list of its tensors."""
    return _internal_rpc_pickler.serialize(obj)


def deserialize(binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
    """Unpack the result of :func:`serialize`."""
    return _internal_rpc_pickler.deserialize(binary_data, tensor_table)


def _build_rpc_profiling_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    return f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"
