"""Pickles that run something, or try to: published ones, and tricks with each opcode that could.

Whatever they run would call :func:`fire`, or raise an audit event that the tests watch. Each is a whole pickle; none of
them is harmless to ``pickle.loads``, or is meant to be.
"""

from __future__ import annotations

import struct
from typing import Any

__all__ = ["FIRED", "PAYLOADS", "fire"]

FIRED: list[Any] = []


def fire(*args: Any, **kwargs: Any) -> str:
    """Note that a payload has run."""
    FIRED.append((args, kwargs))
    return "fired"


_HERE = "tests.intruders.payloads"
_PROTO = b"\x80\x05"


def _text(value: str) -> bytes:
    raw = value.encode()
    return b"\x8c" + bytes([len(raw)]) + raw if len(raw) < 256 else b"X" + struct.pack("<I", len(raw)) + raw


def _name(module: str, name: str) -> bytes:
    return _text(module) + _text(name) + b"\x93"


def _old(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _tuple(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def _call(function: bytes, *args: bytes) -> bytes:
    return function + _tuple(*args) + b"R"


def _reduce(module: str, name: str, *args: bytes) -> bytes:
    return _PROTO + _call(_name(module, name), *args) + b"."


_FIRE = _name(_HERE, "fire")
_CODE = _text(f"__import__({_HERE!r}, fromlist=['x']).fire()")
_SHELL = _text("echo fired >&2")
_GETATTR = _name("builtins", "getattr")
_IMPORT = _name("builtins", "__import__")
_tensor = _name("actorrpc.serialization.tensors", "tensor")

PAYLOADS: dict[str, bytes] = {
    # -- what runs a command or some code, called by REDUCE
    "os.system": _reduce("os", "system", _SHELL),
    "posix.system": _reduce("posix", "system", _SHELL),
    "os.popen": _reduce("os", "popen", _SHELL),
    "os.execv": _reduce("os", "execv", _text("/bin/true"), b"]" + _text("true") + b"a"),
    "os.posix_spawn": _reduce("os", "posix_spawn", _text("/bin/true"), b"]" + _text("x") + b"a", b"}"),
    "os.fork": _reduce("os", "fork"),
    "os.kill": _reduce("os", "kill", b"K\x00", b"K\x00"),
    "os.remove": _reduce("os", "remove", _text("/nonexistent/fired")),
    "os._exit": _reduce("os", "_exit", b"K\x07"),
    "subprocess.Popen": _reduce("subprocess", "Popen", _SHELL, b"J\xff\xff\xff\xff"),
    "subprocess.check_output": _reduce("subprocess", "check_output", b"]" + _text("true") + b"a"),
    "subprocess.getoutput": _reduce("subprocess", "getoutput", _SHELL),
    "pty.spawn": _reduce("pty", "spawn", _text("true")),
    "platform.popen": _reduce("platform", "popen", _SHELL),
    "commands.getoutput": _reduce("commands", "getoutput", _SHELL),
    "asyncio.unix_events": _reduce("asyncio.unix_events", "_UnixSubprocessTransport._start", b")"),
    "eval": _reduce("builtins", "eval", _CODE),
    "exec": _reduce("builtins", "exec", _CODE),
    "compile": _reduce("builtins", "compile", _CODE, _text("x"), _text("eval")),
    "open": _reduce("builtins", "open", _text("/nonexistent/fired"), _text("w")),
    "breakpoint": _reduce("builtins", "breakpoint"),
    "builtins.__import__": _reduce("builtins", "__import__", _text("this")),
    "__builtin__.eval": _reduce("__builtin__", "eval", _CODE),
    "importlib.import_module": _reduce("importlib", "import_module", _text("antigravity")),
    "importlib machinery": _reduce(
        "importlib.machinery", "SourceFileLoader", _text("x"), _text("/nonexistent/fired")
    ),
    "code.interact": _reduce("code", "InteractiveInterpreter.runcode", _CODE),
    "pdb.run": _reduce("pdb", "run", _CODE),
    "bdb.Bdb.run": _reduce("bdb", "Bdb.run", _CODE),
    "cProfile.run": _reduce("cProfile", "run", _CODE),
    "profile.Profile.run": _reduce("profile", "Profile.run", _CODE),
    "timeit.timeit": _reduce("timeit", "timeit", _CODE),
    "trace.Trace.run": _reduce("trace", "Trace.run", _CODE),
    "runpy.run_path": _reduce("runpy", "run_path", _text("/nonexistent/fired")),
    "runpy._run_code": _reduce("runpy", "_run_code", _CODE, b"}"),
    "webbrowser.open": _reduce("webbrowser", "open", _text("http://localhost/fired")),
    "ctypes.CDLL": _reduce("ctypes", "CDLL", b"N"),
    "ctypes.pythonapi": _reduce("ctypes", "memmove", b"K\x00", b"K\x00", b"K\x01"),
    "socket.socket": _reduce("socket", "socket"),
    "urllib": _reduce("urllib.request", "urlopen", _text("http://localhost/fired")),
    "shutil.rmtree": _reduce("shutil", "rmtree", _text("/nonexistent/fired")),
    "tempfile.mktemp": _reduce("tempfile", "NamedTemporaryFile"),
    "pip.main": _reduce("pip", "main", b"]" + _text("list") + b"a"),
    "pydoc.pipepager": _reduce("pydoc", "pipepager", _text("x"), _SHELL),
    "distutils spawn": _reduce("distutils.spawn", "spawn", b"]" + _text("true") + b"a"),
    "logging.config": _reduce("logging.config", "_resolve", _text("os.system")),
    "sys.modules": _PROTO + _name("sys", "modules") + b".",
    "sys.settrace": _reduce("sys", "settrace", _FIRE),
    "gc.get_objects": _reduce("gc", "get_objects"),
    "atexit.register": _reduce("atexit", "register", _FIRE),
    "threading.Thread": _reduce("threading", "Thread", b"N", _FIRE),
    "signal.signal": _reduce("signal", "signal", b"K\x0e", _FIRE),
    "codecs.decode": _reduce("codecs", "decode", b"C\x01x", _text("zlib")),
    "_codecs.encode": _reduce("_codecs", "encode", _text("x"), _text("latin1")),
    "multiprocessing": _reduce("multiprocessing.util", "spawnv_passfds", _text("/bin/true"), b"]", b"]"),
    "concurrent.futures": _reduce("concurrent.futures.process", "_process_worker", b"N"),
    # -- what calls something else
    "functools.partial": _reduce("functools", "partial", _FIRE, b"K\x01"),
    "functools.reduce": _reduce("functools", "reduce", _FIRE, b"]K\x01aK\x02a"),
    "operator.methodcaller": _PROTO
    + _call(_call(_name("operator", "methodcaller"), _text("system"), _SHELL), _name("os", "path"))
    + b".",
    "operator.attrgetter": _PROTO
    + _call(_call(_name("operator", "attrgetter"), _text("system")), _name("os", "path"))
    + b".",
    "operator.itemgetter": _reduce("operator", "itemgetter", _text("x")),
    "operator.call": _reduce("operator", "call", _FIRE),
    "map": _reduce("builtins", "map", _FIRE, b"]K\x01a"),
    "filter": _reduce("builtins", "filter", _FIRE, b"]K\x01a"),
    "iter": _reduce("builtins", "iter", _FIRE, _text("fired")),
    "sorted by key": _reduce("builtins", "max", b"]K\x01aK\x02a", _FIRE),
    "apply": _reduce("__builtin__", "apply", _FIRE, b")"),
    "types.FunctionType": _reduce("types", "FunctionType", _name("types", "CodeType"), b"}"),
    "types.CodeType": _reduce("types", "CodeType", b"K\x00"),
    "type()": _reduce("builtins", "type", _text("X"), b")", b"}" + _text("__del__") + _FIRE + b"s"),
    "weakref.finalize": _reduce("weakref", "finalize", b"]", _FIRE),
    "contextlib.ExitStack": _reduce("contextlib", "ExitStack"),
    "the canary itself": _PROTO + _call(_FIRE) + b".",
    # -- chains of attributes
    "getattr chain": _PROTO
    + _call(_call(_GETATTR, _call(_IMPORT, _text("os")), _text("system")), _SHELL)
    + b".",
    "subclasses chain": _PROTO
    + _call(_call(_GETATTR, _name("builtins", "object"), _text("__subclasses__")))
    + b".",
    "dotted name": _PROTO + _call(_name("builtins", "object.__subclasses__")) + b".",
    "dotted name of ours": _PROTO
    + _call(_name("actorrpc.serialization.tensors", "torch.os.system"), _SHELL)
    + b".",
    "globals of a maker": _PROTO + _name("actorrpc.serialization.tensors", "tensor.__globals__") + b".",
    "builtins of the machine": _PROTO + _name("actorrpc.serialization.data_only", "loads") + b".",
    "the registry": _reduce("actorrpc.serialization.data_only", "permit_function", _FIRE),
    "allow": _reduce("actorrpc.serialization.data_only", "allow", _FIRE),
    "exposed": _reduce("actorrpc.serialization.data_only", "exposed", _FIRE),
    # -- torch
    "torch.load": _reduce("torch.serialization", "load", _text("/nonexistent/fired")),
    "torch.hub.load": _reduce("torch.hub", "load", _text("a/b"), _text("c")),
    "torch.jit.load": _reduce("torch.jit", "load", _text("/nonexistent/fired")),
    "torch.jit.unpickle": _reduce("torch.jit._pickle", "restore_type_tag", b"]", _text("x")),
    "torch rebuild": _reduce("torch._utils", "_rebuild_tensor_v2", b"N", b"K\x00", b")", b")", b"\x89", b"}"),
    "torch rebuild_from_type": _reduce(
        "torch._tensor", "_rebuild_from_type_v2", _FIRE, _name("torch", "Tensor"), b")", b"}"
    ),
    "torch execute": _reduce("torch.utils._config_module", "install_config_module", b"N"),
    "torch internal rpc": _reduce("torch.distributed.rpc.internal", "_run_function", _FIRE),
    "torch multiprocessing": _reduce(
        "torch.multiprocessing.reductions", "rebuild_storage_fd", b"N", b"N", b"K\x01"
    ),
    "torch.nn.Module": _PROTO + _name("torch.nn.modules.linear", "Linear") + b")\x81.",
    "torch distributed run": _reduce("torch.distributed.run", "main", b"]"),
    # -- numpy
    "numpy runstring": _reduce("numpy.testing._private.utils", "runstring", _CODE, b"}"),
    "numpy.load": _reduce("numpy", "load", _text("/nonexistent/fired")),
    "numpy object scalar": _reduce(
        "numpy._core.multiarray", "scalar", _call(_name("numpy", "dtype"), _text("O")), b"C\x01x"
    ),
    "numpy object dtype": _reduce("numpy", "dtype", _text("O8"), b"\x89", b"\x88"),
    "numpy flags of a dtype": _PROTO
    + _call(_name("numpy", "dtype"), _text("i8"), b"\x89", b"\x88")
    + _tuple(b"K\x03", _text("<"), b"N", b"N", b"N", b"J\xff\xff\xff\xff", b"J\xff\xff\xff\xff", b"K\x3f")
    + b"b.",
    "numpy fields of a dtype": _reduce("numpy", "dtype", b"]" + _text("f8") + b"a"),
    # -- pickle and its friends
    "pickle.loads": _reduce("pickle", "loads", b"C\x02N."),
    "_pickle.loads": _reduce("_pickle", "loads", b"C\x02N."),
    "cloudpickle.loads": _reduce("cloudpickle", "loads", b"C\x02N."),
    "cloudpickle function": _reduce(
        "cloudpickle.cloudpickle", "_make_function", b"N", b"N", b"N", b"N", b"N"
    ),
    "cloudpickle subimport": _reduce("cloudpickle.cloudpickle", "subimport", _text("os")),
    "cloudpickle type": _reduce("cloudpickle.cloudpickle", "_make_skeleton_class", b"N"),
    "dill": _reduce("dill._dill", "_eval_repr", _CODE),
    "joblib": _reduce("joblib", "load", _text("/nonexistent/fired")),
    "marshal.loads": _reduce("marshal", "loads", b"C\x01N"),
    "shelve": _reduce("shelve", "open", _text("/nonexistent/fired")),
    "yaml": _reduce("yaml", "unsafe_load", _text("x")),
    "our codec": _reduce("actorrpc.serialization.codec", "loads", b"C\x02N."),
    "our definitions": _reduce("actorrpc.serialization.by_value", "definition", b"C\x10" + bytes(16)),
    "our methods of actors": _reduce("actorrpc.actors.spec.class_info", "_rebuild", b"C\x02N."),
    "our proxies of RRefs": _reduce("actorrpc.rpc.rref", "_invoke", b"N", _text("__class__"), b")", b"}"),
    "copyreg._reconstructor": _reduce(
        "copyreg", "_reconstructor", _name("builtins", "object"), _name("builtins", "object"), b"N"
    ),
    "copyreg.__newobj__": _reduce("copyreg", "__newobj__", _name("builtins", "object")),
    "copyreg.add_extension": _reduce("copyreg", "add_extension", _text("os"), _text("system"), b"K\x01"),
    "copyreg.pickle": _reduce("copyreg", "pickle", _name("builtins", "int"), _FIRE),
    # -- opcodes
    "GLOBAL": _old("os", "system") + b"(" + b"S'echo fired'\n" + b"tR.",
    "GLOBAL, protocol 2": b"\x80\x02" + _old("os", "system") + _tuple(_SHELL) + b"R.",
    "GLOBAL of what is allowed": _PROTO + _old("builtins", "complex") + b")R.",
    "INST": b"(S'echo fired'\nios\nsystem\n.",
    "INST, protocol 5": _PROTO + b"(" + _SHELL + b"ios\nsystem\n.",
    "OBJ": _PROTO + b"(" + _name("os", "system") + _SHELL + b"o.",
    "OBJ of what is allowed": _PROTO + b"(" + _name("builtins", "complex") + b"o.",
    "NEWOBJ": _PROTO + _name("subprocess", "Popen") + _tuple(_SHELL) + b"\x81.",
    "NEWOBJ of an exception": _PROTO + _name("builtins", "ValueError") + b")\x81.",
    "NEWOBJ of a number": _PROTO + _name("builtins", "complex") + b")\x81.",
    "NEWOBJ_EX": _PROTO
    + _name("subprocess", "Popen")
    + _tuple(_SHELL)
    + b"}"
    + _text("shell")
    + b"\x88s\x92.",
    "NEWOBJ_EX of an array": _PROTO + _name("numpy", "ndarray") + b")}\x92.",
    "BUILD of a list": _PROTO + b"]}" + _text("append") + _text("x") + b"sb.",
    "BUILD of a function": _PROTO + _FIRE + b"}b.",
    "BUILD of a tensor's class": _PROTO + _call(_name("torch", "Size")) + b"}" + _text("x") + b"Nsb.",
    "EXT1": _PROTO + b"\x82\x01)R.",
    "EXT2": _PROTO + b"\x83\x01\x00)R.",
    "EXT4": _PROTO + b"\x84\x01\x00\x00\x00)R.",
    "PERSID": b"Pfired\n.",
    "BINPERSID": _PROTO + _text("fired") + b"Q.",
    "DUP": _PROTO + _FIRE + b"2.",
    "STACK_GLOBAL from the memo": _PROTO
    + _text("system")
    + b"\x94"
    + _text("os")
    + b"\x94"
    + b"h\x01h\x00\x93"
    + _tuple(_SHELL)
    + b"R.",
    "a name put together": _PROTO + _text("os") + b"\x94" + b"0h\x00" + _text("system") + b"\x93.",
    "PUT and GET": _PROTO + _old("os", "system") + b"p0\n0g0\n" + _tuple(_SHELL) + b"R.",
    "LONG_BINPUT": _PROTO + b"Nr\xff\xff\xff\x7f.",
    "BINPUT": _PROTO + b"Nq\x05.",
    # -- calls of what may be there, but not be called
    "a call of a text": _PROTO + _call(_text("os.system"), _SHELL) + b".",
    "a call of a dtype": _PROTO + _call(_name("torch", "float32")) + b".",
    "a call of a function that is exposed": _PROTO
    + _call(_name("tests.intruders.service", "add"), b"K\x01", b"K\x02")
    + b".",
    "a class as a value": _PROTO + _name("builtins", "ValueError") + b"\x85.",
    "a maker as a value": _PROTO + b"]" + _name("builtins", "complex") + b"a.",
    "a maker as the message": _PROTO + _tensor + b".",
    "a maker as a key": _PROTO + b"}" + _name("builtins", "complex") + b"Ns.",
    "a maker in a set": _PROTO + b"\x8f(" + _name("builtins", "complex") + b"\x90.",
    "a maker in a frozenset": _PROTO + b"(" + _name("builtins", "complex") + b"\x91.",
    "a class in an exception": _PROTO
    + _call(_name("builtins", "ValueError"), _name("builtins", "ValueError"))
    + b".",
    "a name that is not exposed": _reduce(
        "actorrpc.serialization.data_only", "find_named", _text("os.system")
    ),
}
"""What is refused, by what it tries."""

NONSENSE: dict[str, bytes] = {
    "empty": b"",
    "nothing but the end": b".",
    "two values": _PROTO + b"NN.",
    "no end": _PROTO + b"N",
    "a protocol of the future": b"\x80\x06N.",
    "LONG4 of 2 GiB": _PROTO + b"\x8b\xff\xff\xff\x7fx.",
    "LONG4 of a negative size": _PROTO + b"\x8b\xff\xff\xff\xffx.",
    "LONG1 cut short": _PROTO + b"\x8a\xffx.",
    "FRAME of 8 EiB": _PROTO + b"\x95" + b"\xff" * 7 + b"\x7fN.",
    "BINBYTES of 4 GiB": _PROTO + b"B\xff\xff\xff\xffx.",
    "BINBYTES8 of 8 EiB": _PROTO + b"\x8e" + b"\xff" * 7 + b"\x7fx.",
    "BINBYTES8 of all": _PROTO + b"\x8e" + b"\xff" * 8 + b"x.",
    "BYTEARRAY8 of 8 EiB": _PROTO + b"\x96" + b"\xff" * 7 + b"\x7fx.",
    "BINUNICODE8 of 8 EiB": _PROTO + b"\x8d" + b"\xff" * 7 + b"\x7fx.",
    "text that is none": _PROTO + b"\x8c\x02\xff\xfe.",
    "memo that is empty": _PROTO + b"h\x00.",
    "memo far away": _PROTO + b"Nj\xff\xff\xff\xff.",
    "MEMOIZE of nothing": _PROTO + b"\x94.",
    "TUPLE without a mark": _PROTO + b"NNt.",
    "TUPLE3 of two": _PROTO + b"NN\x87.",
    "a mark as a value": _PROTO + b"(\x85.",
    "APPEND to nothing": _PROTO + b"Na.",
    "APPEND to a text": _PROTO + _text("x") + b"Na.",
    "SETITEM of a list": _PROTO + b"]NNs.",
    "SETITEMS of three": _PROTO + b"}(NNNu.",
    "a list as a key": _PROTO + b"}]Ns.",
    "ADDITEMS to a list": _PROTO + b"](N\x90.",
    "BUILD of nothing": _PROTO + b"b.",
    "STACK_GLOBAL of numbers": _PROTO + b"K\x01K\x02\x93.",
    "REDUCE without arguments": _PROTO + _name("builtins", "complex") + b"R.",
    "REDUCE with a list": _PROTO + _name("builtins", "complex") + b"]R.",
    "a buffer that is not there": _PROTO + b"\x97.",
    "READONLY of a number": _PROTO + b"N\x98.",
    "deep tuples": _PROTO + b")" + b"\x85" * 5000 + b".",
    "deep lists": _PROTO + b"]" * 5000 + b"a" * 4999 + b".",
    "a key that takes for ever to hash": _PROTO
    + b"}"
    + b"K\x01"
    + b"\x94h\x00\x86"
    + b"".join(b"\x94h" + bytes([n]) + b"\x86" for n in range(1, 60))
    + b"Ns.",
    "a bytearray of 1 TiB": _reduce("builtins", "bytearray", b"\x8a\x06\x00\x00\x00\x00\x00\x01"),
    "a set of 10^12": _reduce(
        "builtins", "set", _call(_name("builtins", "range"), b"\x8a\x06\x00\x00\x00\x00\x00\x01")
    ),
    "a deque of 10^12": _reduce(
        "collections", "deque", _call(_name("builtins", "range"), b"\x8a\x06\x00\x00\x00\x00\x00\x01")
    ),
    "an array of 2 TiB": _reduce(
        "numpy._core.numeric",
        "_frombuffer",
        b"C\x01x",
        _call(_name("numpy", "dtype"), _text("u1")),
        b"\x8a\x06\x00\x00\x00\x00\x00\x01\x85",
        _text("C"),
    ),
    "an array of a negative size": _reduce(
        "numpy._core.numeric",
        "_frombuffer",
        b"C\x01x",
        _call(_name("numpy", "dtype"), _text("u1")),
        b"J\xff\xff\xff\xff\x85",
        _text("C"),
    ),
    "a numpy text of 4 GiB": _reduce("numpy", "dtype", _text("U1000000000")),
    "a tensor without memory": _reduce(
        "actorrpc.serialization.tensors", "tensor", b"K\x00", b"K\x06", b"K\x00", b"K\x02", b"K\x01"
    ),
    "a tensor of texts": _reduce("actorrpc.serialization.tensors", "tensor", _text("x"), b"K\x06", b"K\x00"),
    "a tensor of floats": _reduce(
        "actorrpc.serialization.tensors",
        "tensor",
        b"K\x00",
        b"K\x06",
        b"G\x7f\xf8" + bytes(6),
        b"K\x02",
        b"K\x01",
    ),
    "an exception's class": _reduce("actorrpc.serialization.exceptions", "_create", _text("x"), b")"),
    "an exception's dunder": _PROTO
    + _call(_name("builtins", "ValueError"))
    + b"}"
    + _text("__class__")
    + b"Nsb.",
    "an error's dunder": _PROTO
    + _call(
        _name("actorrpc.serialization.exceptions", "_restore"),
        _call(_name("builtins", "ValueError")),
        b")",
        b"}" + _text("__class__") + b"Ns",
    )
    + b".",
}
"""What makes no sense, would be very large, or would take for ever."""
