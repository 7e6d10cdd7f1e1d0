"""Messages that try to run code, that contain false sizes or types, or that are pickles.

A successful attack would call :func:`fire`, or raise an audit event that the tests watch.
"""

from __future__ import annotations

import pickle
import struct
from typing import Any

import msgpack

__all__ = ["DANGEROUS", "FIRED", "NONSENSE", "PAYLOADS", "PICKLES", "Kind", "body", "fire", "row"]

FIRED: list[Any] = []


def fire(*args: Any, **kwargs: Any) -> str:
    """Record that a payload has run."""
    FIRED.append((args, kwargs))
    return "fired"


class Kind:
    """A value of a kind with the parts ``values``; ``count`` is the number of parts that the message claims."""

    def __init__(self, name: str, *values: Any, count: int | None = None) -> None:
        self.name = name
        self.values = values
        self.count = len(values) if count is None else count


def row(*values: Any) -> bytes:
    """Encode values like a worker, but without checks."""
    found = b""
    for value in values:
        if isinstance(value, Kind):
            found += msgpack.packb(msgpack.ExtType(1, struct.pack(">I", value.count) + value.name.encode()))
            found += row(*value.values)
        else:
            found += msgpack.packb(value, unicode_errors="surrogatepass")
    return found


def body(data: bytes) -> bytes:
    """Return a complete body with only this row."""
    return data + struct.pack("<QIIIIIB", len(data), 0, 0, 0, 0, 0, 2)


def _tuple(*values: Any) -> Kind:
    return Kind("tuple", *values)


def _object(name: Any, *args: Any, made: bool = False, state: Any = None) -> Kind:
    return Kind("object", name, made, _tuple(*args), state)


def _exception(name: str, args: Any = (), fields: tuple[Any, ...] = (), state: tuple[Any, ...] = ()) -> Kind:
    given = _tuple(*args) if isinstance(args, tuple) else args
    return Kind("exception", name, _tuple(), given, Kind("dict", *fields), Kind("dict", *state))


_HERE = "tests.intruders.payloads"
_SERVICE = "tests.intruders.service"
_CODE = f"__import__({_HERE!r}, fromlist=['x']).fire()"
_SHELL = "echo fired >&2"
_FIRE = Kind("function", f"{_HERE}.fire")
_SYSTEM = Kind("function", "os.system")

# Functions, with arguments, that published attacks on pickle call.
DANGEROUS: dict[str, tuple[Any, ...]] = {
    # -- functions that run a command or code
    **dict.fromkeys(("os.system", "posix.system", "subprocess.Popen"), (_SHELL,)),
    **dict.fromkeys(("builtins.eval", "builtins.exec", "timeit.timeit"), (_CODE,)),
    "os._exit": (),
    "builtins.open": ("/nonexistent/fired", "w"),
    "builtins.__import__": ("this",),
    "ctypes.CDLL": (None,),
    "sys.settrace": (_FIRE,),
    # -- functions that call another function
    "functools.partial": (_FIRE, 1),
    "operator.attrgetter": ("system",),
    "builtins.map": (_FIRE, Kind("list", 1)),
    "builtins.type": ("X", _tuple(), Kind("dict", "__del__", _FIRE)),
    f"{_HERE}.fire": (),
    # -- chains of attributes
    "builtins.getattr": ("os", "system"),
    "builtins.object.__subclasses__": (),
    "actorrpc.serialization.tensors.torch.os.system": (_SHELL,),
    "actorrpc.serialization.data_only._functions.__setitem__": ("x", 1),
    "actorrpc.serialization.data_only.allow": (_FIRE,),
    f"{_SERVICE}.add.__globals__": (),
    f"{_SERVICE}.Point.__init__": (),
    # -- torch, numpy
    **dict.fromkeys(("torch.load", "numpy.load"), ("/nonexistent/fired",)),
    "torch._utils._rebuild_tensor_v2": (None, 0, _tuple(), _tuple(), False, Kind("dict")),
    "torch.nn.modules.linear.Linear": (1, 1),
    "torch.Tensor": (3,),
    # -- pickle, and functions of actorrpc that unpickle
    "pickle.loads": (b"N.",),
    "actorrpc.serialization.codec.loads": (b"\x80\x05N.",),
    "actorrpc.rpc.rref._invoke": (None, "__class__", _tuple(), Kind("dict")),
    "actorrpc.rpc.rref._rebuild": (0,),
    "copyreg._reconstructor": (None, None, None),
    # -- names that are allowed, but as another kind of object
    "builtins.ValueError": ("x",),
    f"{_SERVICE}.add": (1, 2),
    "same/1": (1,),
    f"{_SERVICE}.Secret": (1,),
    "": (),
}

PAYLOADS: dict[str, bytes] = {
    **{f"a call of {name}": row(_object(name, *DANGEROUS[name])) for name in ("os.system", f"{_HERE}.fire")},
    **{
        f"{prefix} {name}": row(Kind("function", name))
        for prefix, name in (
            ("the function", "os.system"),
            ("a part of", "actorrpc.serialization.data_only.find_named"),
            ("the hidden", f"{_SERVICE}.hidden"),
            ("the class", f"{_SERVICE}.Point"),
            ("the unimported", "antigravity.geohash"),
            ("a name with another case:", "Same/1"),
            ("a long", "x" * 100_000),
        )
    },
    **{
        f"the kind {name!r}": row(Kind(name, "os.system"))
        for name in ("", "reduce", "LIST", "tensor\0", "os.system", "find_named", "é")
    },
    **{
        f"the exception {name}": row(_exception(name, ("x",)))
        for name in ("os.system", "builtins.int", "subprocess.CalledProcessError", f"{_SERVICE}.Point")
    },
    **{
        f"made by __new__: {name}": row(_object(name, _SHELL, made=True))
        for name in ("subprocess.Popen", "builtins.ValueError", "builtins.object", "numpy.ndarray")
    },
    "hidden in a list": row(Kind("list", _tuple(1, _object("os.system", _SHELL)))),
    "hidden in a key": row(Kind("dict", _SYSTEM, 1)),
    "hidden in the state of an object": row(
        _object(f"{_SERVICE}.Bag", made=True, state=Kind("dict", "items", _SYSTEM))
    ),
    "hidden in an exception": row(_exception("builtins.ValueError", (_SYSTEM,))),
    "a name that is a list": row(Kind("function", Kind("list"))),
    "a class that is a function": row(_object(_FIRE)),
    "another extension": msgpack.packb(msgpack.ExtType(2, b"\0\0\0\0list")),
    "an extension without a count": msgpack.packb(msgpack.ExtType(1, b"list")),
    "a numpy array of objects": row(Kind("array", "|O", _tuple(1), bytes(8))),
    "a numpy array of records": row(Kind("array", "|V8", _tuple(1), bytes(8))),
    "a numpy array of texts of 4 GiB": row(Kind("array", "<U1000000000", _tuple(1), bytes(8))),
    "a numpy array whose dtype is an expression": row(Kind("array", "i4,(2,3)f8", _tuple(1), bytes(8))),
    "a numpy array of nothing": row(Kind("array", "<U0", _tuple(1 << 40), b"")),
}
"""Messages that must be refused, by the attack."""

_CALL = b"\x80\x05\x8c\x18tests.intruders.payloads\x8c\x04fire\x93)R."
_FOUR_GIB = 0xFFFFFFFF

NONSENSE: dict[str, bytes] = {
    "empty": b"",
    "two values": row(1, 2),
    "a pickle": _CALL,
    # -- lengths
    "lists of 4 Gi in lists": row(*[Kind("list", count=_FOUR_GIB)] * 90),
    "a list that is one longer": row(Kind("list", 1, 2, count=3)),
    "a list that is one shorter": row(Kind("list", 1, 2, count=1)),
    "a text of 4 GiB": b"\xdb\xff\xff\xff\xffx",
    "an extension of 4 GiB": b"\xc9\xff\xff\xff\xff\x01x",
    "a number that is cut": b"\xcf\x00",
    # -- parts of the format that messages do not use
    "an empty array": b"\x90",
    "arrays of 4 Gi in arrays": b"\xdd\xff\xff\xff\xff" * 1000,
    "a map of 4 Gi": b"\xdf\xff\xff\xff\xff",
    "a timestamp": b"\xd6\xff\x00\x00\x00\x00",
    "the unused type code": b"\xc1",
    "text that is none": b"\xa2\xff\xfe",
    # -- depth
    "deep lists": row(*[Kind("list", count=1)] * 5000, 1),
    "deep keys": row(*[Kind("dict", count=2)] * 5000, 1),
    # -- containers
    "half a pair": row(Kind("dict", 1)),
    "a key twice": row(Kind("dict", "a", 1, "a", 2)),
    "a key twice, in order": row(Kind("OrderedDict", "a", 1, "a", 2)),
    "a member twice": row(Kind("set", 1, 1)),
    "a member of a frozen set twice": row(Kind("frozenset", 1, 1)),
    "a list as a key": row(Kind("dict", Kind("list"), 1)),
    "a dict in a set": row(Kind("set", Kind("dict"))),
    "a deque of no length": row(Kind("deque")),
    "a deque of a negative length": row(Kind("deque", -1)),
    # -- arguments of the wrong type or number
    **{
        f"{name} of {shown}": row(Kind(name, *values))
        for name in (
            *("complex", "range", "slice", "Decimal", "date", "datetime", "time", "timedelta", "timezone"),
            *("device", "dtype", "Size", "int", "bytearray", "array", "tensor", "parameter"),
            *("untyped_storage", "typed_storage", "sparse_coo", "sparse_compressed", "exception", "object"),
        )
        for shown, values in (
            ("a class", (_object(f"{_SERVICE}.Point", 1, 2),)),
            ("nine texts", ("x",) * 9),
        )
    },
    "a bytearray of 1 TiB": row(Kind("bytearray", 1 << 40)),
    "an int of numbers": row(Kind("int", _tuple(1, 2))),
    "a date of the year 0": row(Kind("date", 0, 1, 1)),
    "a date of wrong bytes": row(Kind("date", bytes(4))),
    "a dtype that is another thing": row(Kind("dtype", "Tensor")),
    "a device that is none": row(Kind("device", "os.system")),
    "a timezone of a month": row(Kind("timezone", Kind("timedelta", 31))),
    # -- memory that is not there
    "an array of 2 TiB": row(Kind("array", "|u1", _tuple(1 << 41), b"x")),
    "an array that is one larger": row(Kind("array", "<i4", _tuple(2), bytes(4))),
    "an array that is one smaller": row(Kind("array", "<i4", _tuple(1), bytes(8))),
    "an array of two negative sizes": row(Kind("array", "|u1", _tuple(-1, -1), b"x")),
    "an array of sizes that overflow to one": row(Kind("array", "<i8", _tuple(1 << 61, 1 << 3), b"")),
    "an array of a thousand dimensions": row(Kind("array", "|u1", _tuple(*[1] * 1000), b"x")),
    "an array of a float's size": row(Kind("array", "|u1", _tuple(1.0), b"x")),
    "an array of a number": row(Kind("array", "|u1", _tuple(1), 1 << 40)),
    "a tensor without memory": row(Kind("tensor", 0, 6, 0, 2, 1)),
    "a tensor of floats": row(Kind("tensor", 0, 6, float("nan"), 2, 1)),
    "an empty tensor of 2^60 rows of nothing but -1": row(Kind("tensor", -1, 6, 0, 0, -1, 1, 1)),
    "an empty tensor that is not": row(Kind("tensor", -1, 6, 0, 1 << 40, 1)),
    "an empty tensor of no dtype": row(Kind("tensor", -1, 99, 0, 0, 1)),
    "a storage that is not there": row(Kind("untyped_storage", 0)),
    "a storage of no dtype": row(Kind("typed_storage", -1, 99)),
    # -- state
    "an exception's dunder": row(_exception("builtins.ValueError", state=("__class__", None))),
    "an exception's field that is a dunder": row(_exception("builtins.ValueError", fields=("__cause__", 1))),
    "an exception's arguments": row(_exception("builtins.ValueError", Kind("list"))),
    "a group of no exceptions": row(
        Kind("exception", "builtins.ExceptionGroup", _tuple("x", Kind("list", 1)), None, *[Kind("dict")] * 2)
    ),
    "an object's dunder": row(_object(f"{_SERVICE}.Bag", made=True, state=Kind("dict", "__class__", None))),
    "an object's attribute that is a number": row(
        _object(f"{_SERVICE}.Bag", made=True, state=Kind("dict", 1, None))
    ),
    "an object's state that is a text": row(_object(f"{_SERVICE}.Bag", made=True, state="x")),
    "an object's arguments": row(Kind("object", f"{_SERVICE}.Point", False, 7, None)),
    "an object of too many arguments": row(_object(f"{_SERVICE}.Point", 1, 2, 3)),
    "a colour that is none": row(_object(f"{_SERVICE}.Colour", 7)),
}
"""Messages that are malformed, or would take much memory or time."""

PICKLES: dict[str, bytes] = {
    "data": pickle.dumps([1, {"x": (2.5, "y")}], 5),
    "the canary": _CALL,
    "the canary in text": b"(itests.intruders.payloads\nfire\n.",
    "a command": b"\x80\x05cos\nsystem\n\x8c\x0eecho fired >&2\x85R.",
    "the canary with a table": _CALL + struct.pack("<QIIIIIB", len(_CALL), 0, 0, 0, 0, 0, 1),
    "a definition": _CALL + bytes(16) + struct.pack("<QIIIIIB", len(_CALL), 1, 0, 0, 0, 0, 1),
    "with an unknown magic number": _CALL + struct.pack("<QIIIIIB", len(_CALL), 0, 0, 0, 0, 0, 3),
}
"""Pickles, which a data-only worker refuses without reading them."""
