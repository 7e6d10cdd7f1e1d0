"""Another process that decodes messages and describes their content. It cannot import the modules of the tests.

As a program, it reads length and pickle of ``[(body, buffers, definitions), ...]``, and writes length and pickle of one
text for each, the result of :func:`describe`. A body without definitions may come from any pickler.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import os
import pickle
import struct
import subprocess
import sys
import types
import typing
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from actorrpc.errors import SerializationError
from actorrpc.serialization.codec import DefinitionStore, decode
from tests.serialization.beside import Calls

__all__ = ["Message", "Opener", "describe"]

_ROOT: Final = Path(__file__).resolve().parents[2]
_LENGTH: Final = struct.Struct("<Q")
Message = tuple[bytes, Sequence[bytes], dict[bytes, bytes]]


def describe(value: Any) -> str:
    """Describe a value, so that two values have the same description if a program cannot distinguish them.

    Functions and methods are called. Lists, dicts and objects that occur twice are described once and then referred to.
    """
    return _describe(value, {}, [])


def _describe(value: Any, seen: dict[int, int], kept: list[Any]) -> str:
    def describe_part(part: Any) -> str:
        return _describe(part, seen, kept)

    if value is None or isinstance(value, (bool, int, float, str, bytes, enum.Enum)):
        words = repr(value)
        return f"{type(value).__module__}.{words if len(words) < 99 else (len(words), zlib.crc32(words.encode()))}"
    if isinstance(value, torch.Tensor):
        return f"tensor {value.dtype} {tuple(value.shape)} {value.requires_grad} {value.sum().item()}"
    if isinstance(value, np.ndarray):
        return f"array {value.dtype} {value.shape} {value.sum()}"
    if isinstance(value, type):
        names = sorted(name for name in vars(value) if not name.startswith("_"))
        return f"class {value.__module__} {value.__qualname__} {names} {[each.__name__ for each in value.__mro__]}"
    if isinstance(value, types.MethodType):
        return f"method {describe_part(value.__self__)} gives {_outcome(value, describe_part)}"
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
        return f"function {value.__module__} {value.__qualname__} gives {_outcome(value, describe_part)}"
    if isinstance(value, (types.ModuleType, typing.TypeVar, torch.dtype, types.GenericAlias)):
        return f"{type(value).__name__} {getattr(value, '__name__', value)}"
    if isinstance(value, Calls):
        return describe_part(value.result())
    if isinstance(value, tuple):
        return f"{type(value).__qualname__}({', '.join(map(describe_part, value))})"
    if id(value) in seen:
        return f"again {seen[id(value)]}"
    seen[id(value)] = len(seen)
    kept.append(value)  # keeps results of methods alive, so that their id() is not reused
    if isinstance(value, list):
        return f"[{', '.join(map(describe_part, value))}]"
    if isinstance(value, dict):
        return (
            f"{{{', '.join(f'{describe_part(key)}: {describe_part(each)}' for key, each in value.items())}}}"
        )
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__} {sorted(map(describe_part, value))}"
    if isinstance(value, functools.partial):
        return (
            f"partial {describe_part(value.func)} {describe_part(value.args)} {describe_part(value.keywords)}"
        )
    return f"object of {describe_part(type(value))} with {describe_part(getattr(value, '__dict__', None) or str(value))}"


def _outcome(function: Any, describe_part: Any) -> str:
    try:
        found = function(3)
    except Exception as error:
        return f"{type(error).__name__}"
    return str(describe_part(found))


class Opener:
    """The other process. Not thread-safe."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @classmethod
    @contextlib.contextmanager
    def started(cls) -> Iterator[Opener]:
        """Run such a process until the end."""
        with subprocess.Popen(
            [sys.executable, "-m", "tests.serialization.opening"],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as process:
            try:
                yield cls(process)
            finally:
                process.kill()
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()  # type: ignore[union-attr]

    def ask(self, *messages: Message) -> list[str]:
        """Return the description of each message; for an error, its text."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        data = pickle.dumps(messages)
        self._process.stdin.write(_LENGTH.pack(len(data)) + data)
        self._process.stdin.flush()
        (length,) = _LENGTH.unpack(self._process.stdout.read(_LENGTH.size))
        answers: list[str] = pickle.loads(self._process.stdout.read(length))
        return answers


def _opened(message: Message) -> str:
    body, buffers, definitions = message
    store = DefinitionStore()
    for key, data in definitions.items():
        store.add(key, data)
    try:
        return describe(decode(body, [memoryview(bytearray(each)) for each in buffers], definitions=store))
    except SerializationError as error:
        return f"error: {error}"


def _serve() -> None:
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # some of the called functions print
    while head := requests.read(_LENGTH.size):
        messages = pickle.loads(requests.read(*_LENGTH.unpack(head)))
        data = pickle.dumps([_opened(message) for message in messages])
        answers.write(_LENGTH.pack(len(data)) + data)
        answers.flush()


if __name__ == "__main__":
    _serve()
