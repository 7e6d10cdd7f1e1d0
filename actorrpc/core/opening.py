"""The machine of the data-only mode: it opens a message, and can make data and nothing else.

It reads the part of pickle's protocol 5 that the codec writes; what a name in it stands for is for
:mod:`actorrpc.core.restriction` to say. Python's own unpickler is not used. Lengths are compared with what is there
before anything is made of them. Any thread may open messages; each has a machine of its own. No I/O, no locks.
"""

from __future__ import annotations

import collections
import inspect
import struct
from collections.abc import Callable, Iterable
from typing import Any, Final

from actorrpc.core.restriction import Maker, attributes_of, is_allowed, resolve, set_state, wrong
from actorrpc.errors import ProtocolError, RefusedError, RpcError

__all__ = ["MAX_DEPTH", "MAX_KEY", "loads"]

MAX_DEPTH: Final = 100
"""How deep tuples, lists, dicts and sets may be nested."""
MAX_KEY: Final = 1 << 20
"""How many elements a tuple may have, all told, to be the key of a dict or the member of a set: it is hashed."""

_I4: Final = struct.Struct("<i").unpack_from
_F8: Final = struct.Struct(">d").unpack_from
_MARK: Final = object()
_LINE: Final = 1000
_PAIRED: Final = (dict, collections.OrderedDict)


class _Machine:
    """Opens one message. Reads no byte twice, makes nothing larger than what the bytes contain."""

    __slots__ = ("_at", "_buffers", "_data", "_depths", "_laden", "_memo", "_sizes", "_stack")

    def __init__(self, data: Any, buffers: Iterable[Any]) -> None:
        self._data = memoryview(data)
        self._at = 0
        self._buffers = iter(buffers)
        self._stack: list[Any] = []
        self._memo: list[Any] = []
        # By id, of objects in the memo: how deep a container is, and how many elements a tuple has, all told.
        self._depths: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._laden: dict[int, Any] = {}  # tuples with a maker in them, which are arguments and nothing else

    def run(self) -> Any:
        data, table = self._data, _TABLE
        try:
            while True:
                code = data[self._at]
                self._at += 1
                if code == 0x2E:  # STOP
                    break
                step = table.get(code)
                if step is None:
                    raise RefusedError(
                        f"a message with the pickle opcode {code:#04x} is refused: this worker takes data only"
                    )
                step(self)
            (found,) = self._stack
            self._data_only((found,))
            return found
        except RpcError:
            raise
        except Exception as error:
            raise ProtocolError(
                f"a message cannot be opened: {type(error).__name__}: {str(error)[:200]}"
            ) from error

    # -- reading

    def _take(self, size: int) -> memoryview:
        start = self._at
        found = self._data[start : start + size]
        if len(found) != size:
            wrong(f"{size} bytes announced, {len(found)} there")
        self._at = start + size
        return found

    def _sized(self, width: int) -> memoryview:
        return self._take(int.from_bytes(self._take(width), "little"))

    # -- the stack

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            wrong("a mark where a value must be")
        return value

    def _pop_mark(self) -> list[Any]:
        stack = self._stack
        at = len(stack) - 1
        while stack[at] is not _MARK:  # below the bottom is an IndexError, and so an error in the message
            at -= 1
            if at < 0:
                wrong("no mark")
        items = stack[at + 1 :]
        del stack[at:]
        return items

    def _data_only(self, items: Iterable[Any]) -> int:
        """Refuse makers among what goes into a container; return how deep the container is then."""
        depths, deepest, laden = self._depths, 0, self._laden
        for item in items:
            if type(item) is Maker:
                raise RefusedError(f"{item.name} as a value is refused: this worker takes data only")
            if laden and id(item) in laden:
                raise RefusedError("a class as a value is refused: this worker takes data only")
            depth = depths.get(id(item), 0)
            if depth > deepest:
                deepest = depth
        if deepest >= MAX_DEPTH:
            wrong(f"nested deeper than {MAX_DEPTH}")
        return deepest + 1

    def _grown(self, container: Any, items: Iterable[Any]) -> None:
        depth = self._data_only(items)
        if depth > self._depths.get(id(container), 0):
            self._depths[id(container)] = depth

    def _hashed(self, keys: Iterable[Any]) -> None:
        for key in keys:
            if isinstance(key, tuple) and self._sizes.get(id(key), 0) > MAX_KEY:
                wrong("a key that is too large to be hashed")

    def _tuple(self, items: tuple[Any, ...]) -> None:
        self._stack.append(items)
        if any(type(item) is Maker and item.argument for item in items):
            self._data_only([item for item in items if type(item) is not Maker or not item.argument])
            self._laden[id(items)] = items
            return
        self._depths[id(items)] = self._data_only(items)
        sizes = self._sizes
        sizes[id(items)] = len(items) + sum(
            [sizes.get(id(item), 0) for item in items if isinstance(item, tuple)]
        )

    # -- the opcodes that the codec writes

    def _proto(self) -> None:
        if self._at != 1 or self._take(1)[0] > 5:
            wrong("a pickle of another protocol")

    def _frame(self) -> None:
        if int.from_bytes(self._take(8), "little") > len(self._data) - self._at:
            wrong("a frame that is larger than the message")

    def _text(self, width: int) -> None:
        self._stack.append(str(self._sized(width), "utf-8", "surrogatepass"))

    def _bytes(self, width: int) -> None:
        self._stack.append(bytes(self._sized(width)))

    def _integer(self, width: int) -> None:
        self._stack.append(int.from_bytes(self._take(width), "little"))

    def _long(self, width: int) -> None:
        self._stack.append(int.from_bytes(self._sized(width), "little", signed=True))

    def _last(self, count: int) -> None:
        items = [self._pop() for _ in range(count)]
        self._tuple(tuple(items[::-1]))

    def _append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list and type(target) is not collections.deque:
            wrong(f"items for a {type(target).__name__}")
        self._grown(target, items)
        target.extend(items)

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) not in _PAIRED or len(items) % 2:
            wrong(f"items for a {type(target).__name__}")
        keys = items[::2]
        self._grown(target, items)
        self._hashed(keys)
        for key, value in zip(keys, items[1::2], strict=True):
            target[key] = value

    def _add_items(self) -> None:
        items = self._pop_mark()
        target = self._stack[-1]
        if type(target) is not set:
            wrong(f"items for a {type(target).__name__}")
        self._grown(target, items)
        self._hashed(items)
        target.update(items)

    def _frozenset(self) -> None:
        items = self._pop_mark()
        self._hashed(items)
        depth = self._data_only(items)
        made = frozenset(items)
        self._depths[id(made)] = depth
        self._stack.append(made)

    def _drop(self, items: list[Any]) -> None:
        pass

    def _recall(self, width: int) -> None:
        self._stack.append(self._memo[int.from_bytes(self._take(width), "little")])

    def _buffer(self) -> None:
        self._stack.append(memoryview(next(self._buffers)))

    def _readonly(self) -> None:
        view = self._pop()
        if type(view) is not memoryview:
            wrong(f"a {type(view).__name__} for a buffer")
        self._stack.append(view.toreadonly())

    def _global(self) -> None:
        name, module = self._pop(), self._pop()
        self._stack.append(resolve(module, name))

    def _line(self) -> str:
        end = bytes(self._data[self._at : self._at + _LINE]).find(b"\n")
        return str(self._take(end + 1), "utf-8", "replace").strip() if end >= 0 else "?"

    def _old_global(self) -> None:
        """Refuse the opcodes of old protocols that name something; the codec does not write them."""
        module, name = self._line(), self._line()
        raise RefusedError(f"{module}.{name} by an old opcode is refused: this worker takes data only")

    def _arguments(self, maker: Any, args: Any) -> tuple[Any, ...]:
        if type(maker) is not Maker:
            shown = maker.__qualname__ if inspect.isroutine(maker) else type(maker).__qualname__
            raise RefusedError(f"a call of {shown} within a message is refused: this worker takes data only")
        if type(args) is not tuple:
            wrong("a maker without arguments")
        if id(args) not in self._laden:
            return args
        if not maker.takes:
            raise RefusedError(f"a class for {maker.name} is refused: this worker takes data only")
        return tuple([each.cls or each if type(each) is Maker else each for each in args])

    def _reduce(self) -> None:
        args, maker = self._pop(), self._pop()
        arguments = self._arguments(maker, args)
        self._made(args, maker.make(*arguments))

    def _new(self, kwargs: Any) -> None:
        args, maker = self._pop(), self._pop()
        arguments = self._arguments(maker, args)
        cls = maker.cls
        if not is_allowed(cls):
            raise RefusedError(
                f"{maker.name} without its constructor is refused: this worker takes data only"
            )
        self._data_only((kwargs,))
        self._made(args, cls.__new__(cls, *arguments, **attributes_of(kwargs)))

    def _made(self, args: tuple[Any, ...], made: Any) -> None:
        """Push what was made; it may be a tuple, too, and is as deep and as large as its arguments."""
        self._depths[id(made)] = self._depths.get(id(args), 0)
        if isinstance(made, tuple):
            self._sizes[id(made)] = self._sizes.get(id(args), 0)
        self._stack.append(made)

    def _build(self) -> None:
        state = self._pop()
        self._data_only((state,))
        set_state(self._stack[-1], state)


def loads(data: Any, buffers: Iterable[Any] = ()) -> Any:
    """Open what the codec has pickled, if it is data.

    Arguments:
        data: the pickle; bytes or anything like them.
        buffers: the memory beside it, in order.

    Raises:
        RefusedError: it names something that is not in the tables; nothing of it was run.
        ProtocolError: it makes no sense.
    """
    return _Machine(data, buffers).run()


def _push(value: Any) -> Callable[[_Machine], None]:
    return lambda machine: machine._stack.append(value)


def _fresh(cls: type) -> Callable[[_Machine], None]:
    return lambda machine: machine._stack.append(cls())


_TABLE: Final[dict[int, Callable[[_Machine], None]]] = {
    0x80: _Machine._proto,
    0x95: _Machine._frame,
    ord("N"): _push(None),
    0x88: _push(True),
    0x89: _push(False),
    ord("J"): lambda machine: machine._stack.append(_I4(machine._take(4))[0]),
    ord("K"): lambda machine: machine._integer(1),
    ord("M"): lambda machine: machine._integer(2),
    0x8A: lambda machine: machine._long(1),
    0x8B: lambda machine: machine._long(4),
    ord("G"): lambda machine: machine._stack.append(_F8(machine._take(8))[0]),
    0x8C: lambda machine: machine._text(1),
    ord("X"): lambda machine: machine._text(4),
    0x8D: lambda machine: machine._text(8),
    ord("C"): lambda machine: machine._bytes(1),
    ord("B"): lambda machine: machine._bytes(4),
    0x8E: lambda machine: machine._bytes(8),
    0x96: lambda machine: machine._stack.append(bytearray(machine._sized(8))),
    0x97: _Machine._buffer,
    0x98: _Machine._readonly,
    ord("("): _push(_MARK),
    ord(")"): _push(()),
    0x85: lambda machine: machine._last(1),
    0x86: lambda machine: machine._last(2),
    0x87: lambda machine: machine._last(3),
    ord("t"): lambda machine: machine._tuple(tuple(machine._pop_mark())),
    ord("]"): _fresh(list),
    ord("a"): lambda machine: machine._append([machine._pop()]),
    ord("e"): lambda machine: machine._append(machine._pop_mark()),
    ord("}"): _fresh(dict),
    ord("s"): lambda machine: machine._set_items([machine._pop(), machine._pop()][::-1]),
    ord("u"): lambda machine: machine._set_items(machine._pop_mark()),
    0x8F: _fresh(set),
    0x90: _Machine._add_items,
    0x91: _Machine._frozenset,
    0x94: lambda machine: machine._memo.append(machine._stack[-1]),
    ord("h"): lambda machine: machine._recall(1),
    ord("j"): lambda machine: machine._recall(4),
    ord("0"): lambda machine: machine._drop([machine._pop()]),
    ord("1"): lambda machine: machine._drop(machine._pop_mark()),
    0x93: _Machine._global,
    ord("c"): _Machine._old_global,
    ord("i"): _Machine._old_global,
    ord("R"): _Machine._reduce,
    0x81: lambda machine: machine._new({}),
    0x92: lambda machine: machine._new(machine._pop()),
    ord("b"): _Machine._build,
}
