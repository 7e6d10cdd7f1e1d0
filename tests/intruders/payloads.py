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
    """Encode values like a worker, but without checks; a bytearray is inserted unencoded."""
    found = b""
    for value in values:
        if isinstance(value, bytearray):
            found += value
        elif isinstance(value, Kind):
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


def _called(name: str, *args: Any) -> bytes:
    return row(Kind("object", name, False, _tuple(*args), None))


_HERE = "tests.intruders.payloads"
_SERVICE = "tests.intruders.service"
_CODE = f"__import__({_HERE!r}, fromlist=['x']).fire()"
_SHELL = "echo fired >&2"
_FIRE = Kind("function", f"{_HERE}.fire")

# Functions, with arguments, that published attacks on pickle call.
DANGEROUS: dict[str, tuple[Any, ...]] = {
    # -- functions that run a command or code
    **dict.fromkeys(("os.system", "posix.system", "subprocess.Popen", "commands.getoutput"), (_SHELL,)),
    **dict.fromkeys(("os.fork", "os._exit", "builtins.breakpoint"), ()),
    "os.execv": ("/bin/true", Kind("list", "true")),
    **dict.fromkeys(("builtins.eval", "builtins.exec", "__builtin__.eval", "timeit.timeit"), (_CODE,)),
    "builtins.open": ("/nonexistent/fired", "w"),
    "builtins.__import__": ("this",),
    "importlib.import_module": ("antigravity",),
    "runpy.run_path": ("/nonexistent/fired",),
    "webbrowser.open": ("http://localhost/fired",),
    "ctypes.CDLL": (None,),
    "socket.socket": (),
    "pip.main": (Kind("list", "list"),),
    "logging.config._resolve": ("os.system",),
    "sys.settrace": (_FIRE,),
    "codecs.decode": (b"x", "zlib"),
    # -- functions that call another function
    "functools.partial": (_FIRE, 1),
    "functools.reduce": (_FIRE, Kind("list", 1, 2)),
    **dict.fromkeys(("operator.methodcaller", "operator.attrgetter"), ("system",)),
    "operator.call": (_FIRE,),
    "builtins.map": (_FIRE, Kind("list", 1)),
    "builtins.max": (Kind("list", 1, 2), _FIRE),
    "types.FunctionType": (None, Kind("dict")),
    "builtins.type": ("X", _tuple(), Kind("dict", "__del__", _FIRE)),
    "weakref.finalize": (Kind("list"), _FIRE),
    f"{_HERE}.fire": (),
    # -- chains of attributes
    "builtins.getattr": ("os", "system"),
    "builtins.object.__subclasses__": (),
    "actorrpc.serialization.tensors.torch.os.system": (_SHELL,),
    "actorrpc.serialization.tensors.tensor.__globals__": (),
    "actorrpc.serialization.data_only._functions.__setitem__": ("x", 1),
    **dict.fromkeys((f"actorrpc.serialization.data_only.{n}" for n in ("permit_maker", "allow")), (_FIRE,)),
    "tests.intruders.service.add.__globals__": (),
    "tests.intruders.service.Point.__init__": (),
    # -- torch, numpy
    **dict.fromkeys(("torch.load", "torch.jit.load", "numpy.load"), ("/nonexistent/fired",)),
    "torch._utils._rebuild_tensor_v2": (None, 0, _tuple(), _tuple(), False, Kind("dict")),
    "torch._tensor._rebuild_from_type_v2": (_FIRE, "x", _tuple(), Kind("dict")),
    "torch.nn.modules.linear.Linear": (1, 1),
    "torch.Tensor": (3,),
    "numpy.ndarray": (_tuple(3),),
    # -- pickle and similar modules, and functions of actorrpc that unpickle
    **dict.fromkeys(("pickle.loads", "cloudpickle.loads", "marshal.loads"), (b"N.",)),
    "cloudpickle.cloudpickle._make_function": (None, None, None, None, None),
    "actorrpc.serialization.codec.loads": (b"\x80\x05N.",),
    "actorrpc.serialization.by_value.definition": (bytes(16),),
    "actorrpc.rpc.rref._invoke": (None, "__class__", _tuple(), Kind("dict")),
    "actorrpc.rpc.rref._rebuild": (0,),
    "copyreg._reconstructor": (None, None, None),
    "copyreg.add_extension": ("os", "system", 1),
    # -- names that are allowed, but as another kind of object
    "builtins.ValueError": ("x",),
    "builtins.complex": (1.0, 2.0),
    "torch.float32": (),
    "tests.intruders.service.add": (1, 2),
    "same/1": (1,),
    "tests.intruders.service.Secret": (1,),
    "": (),
}

PAYLOADS: dict[str, bytes] = {
    **{f"a call of {name}": _called(name, *args) for name, args in DANGEROUS.items()},
    **{
        f"{prefix} {name}": row(Kind("function", name))
        for prefix, name in (
            ("the function", "os.system"),
            ("a part of", "actorrpc.serialization.data_only.find_named"),
            ("the hidden", "tests.intruders.service.hidden"),
            ("the class", "tests.intruders.service.Point"),
            ("a name with another case:", "Same/1"),
            ("a long", "x" * 100_000),
        )
    },
    **{
        f"the kind {name!r}": row(Kind(name, "os.system"))
        for name in (
            *("", "call", "reduce", "global", "LIST", "list ", "tensor\0"),
            *("os.system", "find_named", "_kind", "é"),
        )
    },
    **{
        f"the exception {name}": row(
            Kind("exception", name, _tuple(), _tuple("x"), Kind("dict"), Kind("dict"))
        )
        for name in ("os.system", "builtins.int", "subprocess.CalledProcessError", f"{_SERVICE}.Point")
    },
    **{
        f"made by __new__: {name}": row(Kind("object", name, True, _tuple(_SHELL), None))
        for name in (
            *("subprocess.Popen", "builtins.ValueError", "builtins.complex", "builtins.object"),
            "numpy.ndarray",
        )
    },
    "hidden in a list": row(
        Kind("list", Kind("tuple", 1, Kind("object", "os.system", False, _tuple(_SHELL), None)))
    ),
    "hidden in a key": row(Kind("dict", Kind("function", "os.system"), 1)),
    "hidden in a set": row(Kind("set", Kind("function", "os.system"))),
    "hidden in the state of an object": row(
        Kind(
            "object", f"{_SERVICE}.Bag", True, _tuple(), Kind("dict", "items", Kind("function", "os.system"))
        )
    ),
    "hidden in an exception": row(
        Kind(
            "exception",
            "builtins.ValueError",
            _tuple(),
            _tuple(Kind("function", "os.system")),
            Kind("dict"),
            Kind("dict"),
        )
    ),
    "a name that is a list": row(Kind("function", Kind("list"))),
    "a name that is bytes": row(Kind("function", b"same/1")),
    "a class that is a function": row(Kind("object", _FIRE, False, _tuple(), None)),
    "another extension": msgpack.packb(msgpack.ExtType(2, b"\0\0\0\0list")),
    "the extension 0": msgpack.packb(msgpack.ExtType(0, b"\0\0\0\0list")),
    "an extension without a count": msgpack.packb(msgpack.ExtType(1, b"list")),
    "an extension of nothing": msgpack.packb(msgpack.ExtType(1, b"")),
    "a numpy array of objects": row(Kind("array", "|O", _tuple(1), bytes(8))),
    "a numpy array of records": row(Kind("array", "|V8", _tuple(1), bytes(8))),
    "a numpy array of dates": row(Kind("array", "<M8[s]", _tuple(1), bytes(8))),
    "a numpy array of texts of 4 GiB": row(Kind("array", "<U1000000000", _tuple(1), bytes(8))),
    "a numpy array whose dtype is an expression": row(Kind("array", "i4,(2,3)f8", _tuple(1), bytes(8))),
    "a numpy array of nothing": row(Kind("array", "<U0", _tuple(1 << 40), b"")),
}
"""Messages that must be refused, by the attack."""

_CALL = b"\x80\x05\x8c\x18tests.intruders.payloads\x8c\x04fire\x93)R."
_FOUR_GIB = 0xFFFFFFFF
_TENSOR = ("tensor", 0, 6, 0)

NONSENSE: dict[str, bytes] = {
    "empty": b"",
    "two values": row(1, 2),
    "a pickle": _CALL,
    "half a value behind the end": row(1) + b"\xcd\x01",
    # -- lengths
    "a list of 4 Gi of nothing": row(Kind("list", count=_FOUR_GIB)),
    "lists of 4 Gi in lists": row(*[Kind("list", count=_FOUR_GIB)] * 90),
    "a list that is one longer": row(Kind("list", 1, 2, count=3)),
    "a list that is one shorter": row(Kind("list", 1, 2, count=1)),
    "a text of 4 GiB": b"\xdb\xff\xff\xff\xffx",
    "bytes of 4 GiB": b"\xc6\xff\xff\xff\xffx",
    "an extension of 4 GiB": b"\xc9\xff\xff\xff\xff\x01x",
    "a text that is cut": b"\xd9\x10x",
    "a number that is cut": b"\xcf\x00",
    # -- parts of the format that messages do not use
    "an array": b"\x91\x01",
    "an empty array": b"\x90",
    "an array of 4 Gi": b"\xdd\xff\xff\xff\xff",
    "arrays of 4 Gi in arrays": b"\xdd\xff\xff\xff\xff" * 1000,
    "a map": b"\x81\x01\x02",
    "an empty map": b"\x80",
    "a map of 4 Gi": b"\xdf\xff\xff\xff\xff",
    "a timestamp": b"\xd6\xff\x00\x00\x00\x00",
    "the unused type code": b"\xc1",
    "text that is none": b"\xa2\xff\xfe",
    # -- depth and time
    "deep lists": row(*[Kind("list", count=1)] * 5000, 1),
    "deep tuples": row(*[Kind("tuple", count=1)] * 5000, 1),
    "deep keys": row(*[Kind("dict", count=2)] * 5000, 1),
    # -- containers
    "half a pair": row(Kind("dict", 1)),
    "a key twice": row(Kind("dict", "a", 1, "a", 2)),
    "a key twice, in order": row(Kind("OrderedDict", "a", 1, "a", 2)),
    "a key that is the same number": row(Kind("dict", 1, 1, True, 2)),
    "a member twice": row(Kind("set", 1, 1)),
    "a member of a frozen set twice": row(Kind("frozenset", 1, 1)),
    "a list as a key": row(Kind("dict", Kind("list"), 1)),
    "a dict in a set": row(Kind("set", Kind("dict"))),
    "a deque of no length": row(Kind("deque")),
    "a deque of a negative length": row(Kind("deque", -1)),
    "a deque of a text's length": row(Kind("deque", "x")),
    # -- arguments of the wrong type or number
    **{
        f"{name} of {shown}": row(Kind(name, *values))
        for name in (
            *("complex", "range", "slice", "Decimal", "date", "datetime", "time", "timedelta", "timezone"),
            *("device", "dtype", "Size", "int", "bytearray", "array", "tensor", "parameter"),
            *("untyped_storage", "typed_storage", "sparse_coo", "sparse_compressed", "exception", "object"),
        )
        for shown, values in {
            "a list": (Kind("list", 1),),
            "a dict": (Kind("dict", 1, 2),),
            "a class": (Kind("object", "tests.intruders.service.Point", False, _tuple(1, 2), None),),
            "nine texts": ("x",) * 9,
        }.items()
        if (name, shown) not in {("exception", "a list"), ("exception", "a dict"), ("object", "a list")}
    },
    "a bytearray of 1 TiB": row(Kind("bytearray", 1 << 40)),
    "an int of a number": row(Kind("int", 1 << 40)),
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
    "an array of a negative size": row(Kind("array", "|u1", _tuple(-1), b"x")),
    "an array of two negative sizes": row(Kind("array", "|u1", _tuple(-1, -1), b"x")),
    "an array of a size that overflows": row(Kind("array", "|u1", _tuple(1 << 32, 1 << 32), b"")),
    "an array of sizes that overflow to one": row(Kind("array", "<i8", _tuple(1 << 61, 1 << 3), b"")),
    "an array of a size of 2^64": row(Kind("array", "|u1", _tuple((1 << 64) - 1), b"x")),
    "an array of a thousand dimensions": row(Kind("array", "|u1", _tuple(*[1] * 1000), b"x")),
    "an array of a float's size": row(Kind("array", "|u1", _tuple(1.0), b"x")),
    "an array of a text": row(Kind("array", "|u1", _tuple(1), "x")),
    "an array of a number": row(Kind("array", "|u1", _tuple(1), 1 << 40)),
    "a tensor without memory": row(Kind(*_TENSOR, 2, 1)),
    "a tensor on memory -2": row(Kind("tensor", -2, 6, 0, 2, 1)),
    "a tensor of texts": row(Kind("tensor", "x", 6, 0)),
    "a tensor of floats": row(Kind("tensor", 0, 6, float("nan"), 2, 1)),
    "an empty tensor of 2^60 rows of nothing but -1": row(Kind("tensor", -1, 6, 0, 0, -1, 1, 1)),
    "an empty tensor that is not": row(Kind("tensor", -1, 6, 0, 1 << 40, 1)),
    "an empty tensor of no dtype": row(Kind("tensor", -1, 99, 0, 0, 1)),
    "a storage that is not there": row(Kind("untyped_storage", 0)),
    "a storage of no dtype": row(Kind("typed_storage", -1, 99)),
    # -- state
    "an exception's dunder": row(
        Kind(
            "exception",
            "builtins.ValueError",
            _tuple(),
            _tuple(),
            Kind("dict"),
            Kind("dict", "__class__", None),
        )
    ),
    "an exception's field that is a dunder": row(
        Kind(
            "exception", "builtins.ValueError", _tuple(), _tuple(), Kind("dict", "__cause__", 1), Kind("dict")
        )
    ),
    "an exception's arguments": row(
        Kind("exception", "builtins.ValueError", _tuple(), Kind("list"), Kind("dict"), Kind("dict"))
    ),
    "a group of no exceptions": row(
        Kind(
            "exception",
            "builtins.ExceptionGroup",
            _tuple("x", Kind("list", 1)),
            None,
            Kind("dict"),
            Kind("dict"),
        )
    ),
    "an object's dunder": row(
        Kind("object", "tests.intruders.service.Bag", True, _tuple(), Kind("dict", "__class__", None))
    ),
    "an object's attribute that is a number": row(
        Kind("object", "tests.intruders.service.Bag", True, _tuple(), Kind("dict", 1, None))
    ),
    "an object's state that is a text": row(
        Kind("object", "tests.intruders.service.Bag", True, _tuple(), "x")
    ),
    "an object's arguments": row(Kind("object", "tests.intruders.service.Point", False, 7, None)),
    "an object of too many arguments": row(
        Kind("object", "tests.intruders.service.Point", False, _tuple(1, 2, 3), None)
    ),
    "a colour that is none": row(Kind("object", "tests.intruders.service.Colour", False, _tuple(7), None)),
}
"""Messages that are malformed, or would take much memory or time."""

PICKLES: dict[str, bytes] = {
    "nothing at all": pickle.dumps(None, 5),
    "data": pickle.dumps([1, {"x": (2.5, "y")}], 5),
    "the canary": _CALL,
    "the canary by an old opcode": b"ctests.intruders.payloads\nfire\n)R.",
    "the canary in text": b"(itests.intruders.payloads\nfire\n.",
    "a command": b"\x80\x05cos\nsystem\n\x8c\x0eecho fired >&2\x85R.",
    "an extension": b"\x80\x05\x82\x77)R.",
    "the canary with a table": _CALL + struct.pack("<QIIIIIB", len(_CALL), 0, 0, 0, 0, 0, 1),
    "a definition": _CALL + bytes(16) + struct.pack("<QIIIIIB", len(_CALL), 1, 0, 0, 0, 0, 1),
    "with an unknown magic number": _CALL + struct.pack("<QIIIIIB", len(_CALL), 0, 0, 0, 0, 0, 3),
}
"""Pickles, which a data-only worker refuses without reading them."""
