"""``torch.distributed.rpc.options``: actorrpc's options class, with torch's error texts."""

from __future__ import annotations

from typing import Any

from actorrpc.errors import WrongTypeError
from actorrpc.rpc import options

__all__ = ["TensorPipeRpcBackendOptions"]


class TensorPipeRpcBackendOptions(options.TensorPipeRpcBackendOptions):
    """As :class:`actorrpc.TensorPipeRpcBackendOptions`."""

    def __init__(self, **given: Any) -> None:
        try:
            super().__init__(**given)
        except WrongTypeError as error:
            raise WrongTypeError(f"incompatible constructor arguments: {error}") from error
