"""A plugin for mypy: the types of the methods of handles, and the attributes, such as ``remote``, of ``@remote`` classes.

In ``pyproject.toml``::

    [tool.mypy]
    plugins = ["actorrpc.mypy_plugin"]

Without the plugin, mypy checks ``remote(Cls)``, ``remote(Cls).remote(...)`` and ``handle.rpc_sync().method(...)``. It does not
check ``handle.method.remote(...)``, and it does not know the attributes that ``@remote`` adds to a class, because it ignores the
result of a class decorator. Classes that inherit from :class:`actorrpc.Actor` need no plugin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from mypy.nodes import (
    ARG_STAR,
    ARG_STAR2,
    MDEF,
    Decorator,
    FuncDef,
    MemberExpr,
    NameExpr,
    SymbolTableNode,
    TypeInfo,
    Var,
)
from mypy.plugin import AttributeContext, ClassDefContext, MethodSigContext, Plugin
from mypy.subtypes import find_member
from mypy.typeops import type_object_type
from mypy.types import (
    AnyType,
    CallableType,
    FunctionLike,
    Instance,
    Parameters,
    Type,
    TypeOfAny,
    UnionType,
    get_proper_type,
)
from mypy.typevars import fill_typevars

__all__ = ["ActorPlugin", "plugin"]

_HANDLE: Final = "actorrpc.actors.client.handle.ActorHandle"
# mypy looks these types up in the package that exports them.
_METHOD: Final = "actorrpc.actors.ActorMethod"
_CLASS: Final = "actorrpc.actors.ActorClass"
_REF: Final = "actorrpc.actors.ObjectRef"
_STREAM: Final = "actorrpc.actors.ObjectRefGenerator"
# The types of a method below `@method`, on the class and on an instance. Their last type argument is the type of `remote`.
_MARKED: Final = "actorrpc.actors.client.typed_methods.Method"
_BOUND: Final = "actorrpc.actors.client.typed_methods.BoundMethod"
_REMOTE: Final = frozenset({"actorrpc.remote", "actorrpc.actors.remote", "actorrpc.actors.api.remote"})
_CALLS: Final = frozenset(
    {
        f"{_HANDLE.rpartition('.')[0]}.ActorMethod.remote",
        "actorrpc.actors.client.actor_class.ActorClass.remote",
    }
)
_TASK: Final = "actorrpc.actors.library.tasks.RemoteFunction.remote"
_GIVEN: Final = ("remote", "options", "group", "__actor_class__")
_MARK: Final = "actorrpc"
_COROUTINES: Final = frozenset({"typing.Coroutine", "typing.Awaitable"})
_STREAMS: Final = frozenset(
    {
        "typing.Generator",
        "typing.Iterator",
        "typing.AsyncGenerator",
        "typing.AsyncIterator",
        "typing.Iterable",
    }
)


class ActorPlugin(Plugin):
    """The hooks that mypy calls."""

    def get_class_decorator_hook_2(self, fullname: str) -> Callable[[ClassDefContext], bool] | None:
        """Handle the classes below ``@remote``."""
        return _decorated if fullname in _REMOTE else None

    def get_class_attribute_hook(self, fullname: str) -> Callable[[AttributeContext], Type] | None:
        """Handle ``Cls.remote`` and similar attributes."""
        return _class_attribute if fullname.rpartition(".")[2] in _GIVEN else None

    def get_attribute_hook(self, fullname: str) -> Callable[[AttributeContext], Type] | None:
        """Handle ``handle.method``, and ``remote`` of a task."""
        if fullname == _TASK:
            return _remote_of_task
        return _handle_attribute if fullname.startswith(_HANDLE + ".") else None

    def get_method_signature_hook(self, fullname: str) -> Callable[[MethodSigContext], FunctionLike] | None:
        """Handle the arguments of ``remote(...)``."""
        return _with_refs if fullname in _CALLS else None


def _decorated(ctx: ClassDefContext) -> bool:
    info = ctx.cls.info
    if _MARK not in info.metadata:
        info.metadata[_MARK] = {}
        for name in _GIVEN:
            if name not in info.names:
                var = Var(name, AnyType(TypeOfAny.special_form))
                var.info = info
                var.is_classvar = True
                var._fullname = f"{info.fullname}.{name}"
                info.names[name] = SymbolTableNode(MDEF, var, plugin_generated=True)
    return True


def _class_attribute(ctx: AttributeContext) -> Type:
    """Give ``Cls.remote`` the type of ``ActorClass.remote``: at run time, ``@remote`` makes ``Cls`` an ActorClass."""
    found = get_proper_type(ctx.type)
    name = getattr(ctx.context, "name", "")
    if not isinstance(found, FunctionLike) or not found.is_type_obj():
        return ctx.default_attr_type
    info = found.type_object()
    known = info.get(name)
    if known is None or not known.plugin_generated:
        return ctx.default_attr_type
    if _MARK not in info.metadata:
        if any(_MARK in base.metadata for base in info.mro):
            ctx.api.fail(
                f'"{info.name}" has no "{name}": it is a plain class, put @remote over it', ctx.context
            )
        return ctx.default_attr_type
    made = get_proper_type(type_object_type(info))
    instance = fill_typevars(info)
    if not isinstance(instance, Instance):
        return ctx.default_attr_type
    takes = _parameters(made) if isinstance(made, CallableType) else None
    if isinstance(made, CallableType) and isinstance(get_proper_type(made.ret_type), Instance):
        instance = get_proper_type(made.ret_type)  # type: ignore[assignment]
    takes = (
        takes.copy_modified(arg_types=_or_refs(ctx, takes.arg_types)) if takes is not None else _anything()
    )
    whole = ctx.api.named_generic_type(_CLASS, [takes, instance])
    return find_member(name, whole, whole) or ctx.default_attr_type


def _handle_attribute(ctx: AttributeContext) -> Type:
    """Give ``handle.method`` the type ActorMethod, with the arguments and the result of the class's method."""
    handle = get_proper_type(ctx.type)
    context = ctx.context
    name = context.name if isinstance(context, (MemberExpr, NameExpr)) else ""
    if not isinstance(handle, Instance) or not name:
        return ctx.default_attr_type
    while handle.type.fullname != _HANDLE and handle.type.bases:
        handle = handle.type.bases[0]
    actor = get_proper_type(handle.args[0]) if handle.args else None
    if not isinstance(actor, Instance):
        return ctx.default_attr_type
    member = get_proper_type(find_member(name, actor, actor))
    if member is None or _is_given(actor.type, name):
        if name not in handle.type.names:
            ctx.api.fail(f'"{actor.type.name}" has no method "{name}"', context)
        return ctx.default_attr_type
    if isinstance(member, Instance) and member.type.fullname in (_MARKED, _BOUND):
        remote = get_proper_type(member.args[-1])
        if isinstance(remote, CallableType):
            return ctx.api.named_generic_type(_METHOD, [_parameters(remote), remote.ret_type])
        return ctx.default_attr_type
    if not isinstance(member, FunctionLike):
        if not isinstance(member, AnyType):
            ctx.api.fail(
                f'"{name}" is no method of "{actor.type.name}": read it with handle.rpc_sync().{name}',
                context,
            )
        return ctx.default_attr_type
    if not isinstance(member, CallableType):  # an overloaded method, which a ParamSpec cannot express
        return ctx.default_attr_type
    return ctx.api.named_generic_type(_METHOD, [_parameters(member), _outcome(ctx, actor.type, name, member)])


def _remote_of_task(ctx: AttributeContext) -> Type:
    """Let every argument of a task, positional or keyword, also be an ObjectRef."""
    task = get_proper_type(ctx.type)
    if not isinstance(task, Instance) or not task.args:
        return ctx.default_attr_type
    takes = get_proper_type(task.args[0])
    if not isinstance(takes, Parameters):
        return ctx.default_attr_type
    return CallableType(
        _or_refs(ctx, takes.arg_types),
        takes.arg_kinds,
        takes.arg_names,
        task.args[1],
        ctx.api.named_generic_type("builtins.function", []),
        variables=takes.variables,
        is_ellipsis_args=takes.is_ellipsis_args,
    )


def _is_given(info: TypeInfo, name: str) -> bool:
    found = info.get(name)
    return found is not None and bool(found.plugin_generated) and name in _GIVEN


def _parameters(function: CallableType) -> Parameters:
    return Parameters(
        function.arg_types,
        function.arg_kinds,
        function.arg_names,
        variables=function.variables,
        is_ellipsis_args=function.is_ellipsis_args,
    )


def _anything() -> Parameters:
    unknown = AnyType(TypeOfAny.special_form)
    return Parameters([unknown, unknown], [ARG_STAR, ARG_STAR2], [None, None], is_ellipsis_args=True)


def _with_refs(ctx: MethodSigContext) -> FunctionLike:
    """Let every argument also be an ObjectRef to a value of its type."""
    signature = ctx.default_signature
    if not isinstance(signature, CallableType):
        return signature
    return signature.copy_modified(arg_types=_or_refs(ctx, signature.arg_types))


def _or_refs(ctx: AttributeContext | MethodSigContext, types: Sequence[Type]) -> list[Type]:
    return [
        each
        if isinstance(get_proper_type(each), AnyType)
        else UnionType.make_union([each, ctx.api.named_generic_type(_REF, [each])])
        for each in types
    ]


def _outcome(ctx: AttributeContext, info: TypeInfo, name: str, member: CallableType) -> Type:
    """Return the type of the result of ``remote``: an ObjectRef to the method's result, or a stream of the yielded values."""
    returned = get_proper_type(member.ret_type)
    found = info.get(name)
    node = None if found is None else found.node
    if isinstance(node, Decorator):
        if node.decorators and not (node.func.is_static or node.func.is_class):
            return AnyType(TypeOfAny.special_form)  # an unknown decorator
        node = node.func
    if isinstance(returned, Instance) and isinstance(node, FuncDef):
        if (node.is_generator or node.is_async_generator) and returned.type.fullname in _STREAMS:
            return ctx.api.named_generic_type(_STREAM, [returned.args[0]])
        if node.is_coroutine and returned.type.fullname in _COROUTINES:
            return ctx.api.named_generic_type(_REF, [returned.args[-1]])
    return ctx.api.named_generic_type(_REF, [member.ret_type])


def plugin(version: str) -> type[ActorPlugin]:
    """Return the class of the plugin (mypy's entry point)."""
    del version
    return ActorPlugin
