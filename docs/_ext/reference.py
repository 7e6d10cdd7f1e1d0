"""Generate the reference from the code: public names from their docstrings, options from their declarations.

``.. public-names:: actorrpc.rpc``, in an ``{eval-rst}`` block, documents the names in the ``__all__`` of a module, each object on
one page only and under its shortest public name. Readers of a checkout see tables, which are in the pages between comments:
``<!-- names of actorrpc.rpc -->`` has the first sentence about each name, ``<!-- options of actorrpc.actors.ActorOptions -->``
the fields of a class of options, or the arguments of a function. ``python docs/_ext/reference.py`` regenerates the tables.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import actorrpc
from actorrpc.config import ENVIRONMENT, Settings
from actorrpc.errors import ConfigError

if TYPE_CHECKING:
    from sphinx.application import Sphinx

__all__ = ["PUBLIC", "filled", "main", "meanings", "names_of", "public_name", "rows_of", "setup"]

# Where a user imports from; an object that several of them list is documented with the first.
PUBLIC = (
    "actorrpc.errors",
    "actorrpc.actors",
    "actorrpc.cluster",
    "actorrpc.rpc",
    "actorrpc.autograd",
    "actorrpc.optim",
    "actorrpc.nn",
    "actorrpc.observe",
    "actorrpc.testing",
    "actorrpc.compat",
    "actorrpc",
)


# -- public names ----------------------------------------------------------------------------------------------


def names_of(module: str) -> dict[str, Any]:
    """Return the functions, classes and values in the ``__all__`` of a module, by name."""
    found = importlib.import_module(module)
    listed = {name: getattr(found, name) for name in found.__all__ if name != "__version__"}
    return {name: value for name, value in listed.items() if not isinstance(value, ModuleType)}


@cache
def _documented() -> dict[int, str]:
    """Return the module on whose page each object is documented, by the object's id."""
    found: dict[int, str] = {}
    for module in PUBLIC:
        for value in names_of(module).values():
            found.setdefault(id(value), module)
    return found


def public_name(module: str, name: str) -> str:
    """Return the shortest name under which a user imports it."""
    value = getattr(importlib.import_module(module), name)
    return f"actorrpc.{name}" if getattr(actorrpc, name, None) is value else f"{module}.{name}"


def _members(module: str) -> Iterator[tuple[str, str, Any]]:
    """Yield name, directive and value of each object on a module's page: errors, classes, functions, values."""
    kinds = ("autoexception", "autoclass", "autofunction", "autodata")

    def kind(value: Any) -> str:
        if inspect.isclass(value):
            return kinds[0] if issubclass(value, BaseException) else kinds[1]
        return kinds[2] if inspect.isroutine(value) else kinds[3]

    own = [(name, value) for name, value in names_of(module).items() if _documented()[id(value)] == module]
    for name, value in sorted(own, key=lambda each: (kinds.index(kind(each[1])), each[0].lower())):
        yield public_name(module, name), kind(value), value


def _names_text(module: str) -> Iterator[str]:
    for name, kind, value in _members(module):
        if kind == "autodata":
            yield from _value_text(name, value)
            continue
        yield f".. {kind}:: {name}"
        if kind == "autoexception":
            yield "   :no-members:"
        yield ""


def _value_text(name: str, value: Any) -> Iterator[str]:
    """Yield the documentation of a value: the comment at its definition and, if it is a mapping, its entries."""
    from sphinx.pycode import ModuleAnalyzer

    short = name.rpartition(".")[2]
    yield f".. py:data:: {name}"
    yield ""
    for module in [each for path, each in sys.modules.items() if path.startswith("actorrpc.")]:
        if vars(module).get(short) is value:
            analyzer = ModuleAnalyzer.for_module(module.__name__)
            analyzer.analyze()
            for line in analyzer.attr_docs.get(("", short), ()):
                yield f"   {line}"
    if isinstance(value, Mapping):
        for key, meaning in value.items():
            yield f"   * ``{key}``: {meaning}"
    yield ""


# -- options ---------------------------------------------------------------------------------------------------


def meanings(docstring: str) -> dict[str, str]:
    """Return the descriptions in the ``Attributes:`` or ``Args:`` of a docstring, by name."""
    found: dict[str, str] = {}
    section = re.search(
        r"^(?:Attributes|Args):\n((?:    .*\n|\n)+)", inspect.cleandoc(docstring) + "\n", re.MULTILINE
    )
    if section is None:
        return found
    for entry in re.split(r"\n(?=    \S)", "\n" + section[1])[1:]:
        names, _, meaning = entry.strip().partition(":")
        for name in names.split(","):
            found[name.strip(" *")] = " ".join(meaning.split())
    return found


def _right(name: str, field: dataclasses.Field[Any]) -> str:
    """Return the valid values of an option: the part of its error message after "must be"."""
    check = field.metadata.get("check")
    if check is None:
        return ""
    try:
        check(name, _NOTHING)
    except (ConfigError, TypeError) as error:
        found = re.search(r"must be (.*), not ", str(error))
        return found[1] if found else ""
    return ""


class _Nothing:
    """A value that is invalid for every option."""

    def __repr__(self) -> str:
        return "nothing"


_NOTHING = _Nothing()


def _default(value: Any) -> str:
    if value is inspect.Parameter.empty or value is dataclasses.MISSING:
        return "required"
    return f"``{value!r}``"


def rows_of(target: str) -> list[tuple[str, str, str, str]]:
    """Return name, default, valid values and meaning of each option of a class or function."""
    module, _, name = target.rpartition(".")
    value = getattr(importlib.import_module(module), name)
    if value is Settings:
        return list(_settings_rows())
    if dataclasses.is_dataclass(value):
        said = meanings(value.__doc__ or "")
        rows = []
        for field in sorted(dataclasses.fields(value), key=lambda field: field.name):
            if field.metadata:  # others are internal
                rows.append(
                    (field.name, _default(field.default), _right(field.name, field), said[field.name])
                )
        return rows
    function = value.__init__ if inspect.isclass(value) else value
    said = meanings(value.__doc__ or "")
    given = [each for each in inspect.signature(function).parameters.values() if each.name in said]
    return [
        (each.name, "" if each.kind is each.VAR_KEYWORD else _default(each.default), "", said[each.name])
        for each in given
    ]


def _settings_rows() -> Iterator[tuple[str, str, str, str]]:
    fields = {
        field.metadata.get("variable", f"ACTORRPC_{field.name.upper()}"): field
        for field in dataclasses.fields(Settings)
    }
    for variable, meaning in sorted(ENVIRONMENT.items()):
        field = fields.get(variable)
        name = variable if field is None else f"{field.name}`` / ``{variable}"
        default = "" if field is None else _default(field.default)
        yield name, default, "" if field is None else _right(field.name, field), meaning
    for variable, field in fields.items():
        if variable not in ENVIRONMENT:
            yield field.name, _default(field.default), _right(field.name, field), field.metadata["meaning"]


# -- Markdown --------------------------------------------------------------------------------------------------

_BLOCK = re.compile(r"<!-- (names|options) of ([\w.]+) -->\n.*?<!-- end -->", re.DOTALL)


def filled(page: str) -> str:
    """Return a page with its tables of names and options regenerated from the code."""

    def block(match: re.Match[str]) -> str:
        lines = _options_table(match[2]) if match[1] == "options" else _names_table(match[2])
        return f"<!-- {match[1]} of {match[2]} -->\n\n" + "\n".join(lines) + "\n\n<!-- end -->"

    return _BLOCK.sub(block, page)


def _names_table(module: str) -> Iterator[str]:
    yield from _row("name", "what it is", "where")
    yield "|---|---|---|"
    for name, kind, value in _members(module):
        if kind == "autodata":
            meaning = (
                "a table: names, and what each means" if isinstance(value, Mapping) else f"``{value!r}``"
            )
            yield from _row(f"`{name}`", meaning, f"`{module}`")
        else:
            first = " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())
            yield from _row(f"`{name}`", re.split(r"(?<=\.)\s(?=[A-Z])", first)[0], f"`{value.__module__}`")


def _options_table(target: str) -> Iterator[str]:
    rows = rows_of(target)
    bounds = any(right for _, _, right, _ in rows)
    yield from _row("option", "default", *(["valid values"] if bounds else []), "meaning")
    yield "|---" * (4 if bounds else 3) + "|"
    for name, default, right, meaning in rows:
        yield from _row(f"``{name}``", default, *([right] if bounds else []), meaning)


def _row(*cells: str) -> Iterator[str]:
    """Yield a row of a table. The cells are reStructuredText, as in docstrings."""
    plain = [re.sub(r":\w+:`~(?:\w+\.)*(\w+)`", r"`\1`", each) for each in cells]
    plain = [re.sub(r":\w+:`([^`]*)`", r"`\1`", each).replace("``", "`") for each in plain]
    yield "| " + " | ".join(each.replace("|", "\\|") for each in plain) + " |"


def main() -> None:
    """Regenerate the tables in all pages of the reference."""
    for path in sorted((Path(__file__).resolve().parent.parent / "reference").glob("*.md")):
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")


# -- Sphinx ----------------------------------------------------------------------------------------------------


def _resolve(app: Sphinx, environment: Any, node: Any, content: Any) -> Any:
    """Resolve a reference in a docstring, which names an object by its module or by its name alone."""
    del app
    if node.get("refdomain") != "py":
        return None
    domain = environment.get_domain("py")
    from sphinx.util.nodes import make_refnode

    target = node["reftarget"]
    parts = target.split(".")
    # ``Class.method`` comes before a function of the same name.
    for count in (2, 1):
        end = ".".join(parts[-count:])
        found = sorted((name for name in domain.objects if name == end or name.endswith(f".{end}")), key=len)
        if len(parts) >= count and found:
            entry = domain.objects[found[0]]
            builder = environment.app.builder if hasattr(environment, "app") else None
            if builder is None:
                return None
            return make_refnode(builder, node["refdoc"], entry.docname, entry.node_id, content, found[0])
    # The type of an argument may be a class that no user names.
    if target.startswith("actorrpc.") or node.get("reftype") == "class":
        return content
    return None


def _bases(_app: Sphinx, _name: str, _value: object, _options: object, bases: list[Any]) -> None:
    """Replace private base classes by their public bases."""
    while hidden := [base for base in bases if inspect.isclass(base) and base.__name__.startswith("_")]:
        bases[:] = [found for base in bases for found in (base.__bases__ if base in hidden else (base,))]


def _signature(
    _app: Sphinx, what: str, _name: str, _value: object, _options: object, given: Any, returned: Any
) -> Any:
    """Simplify parameter specifications: Sphinx cannot parse the form in which it writes them."""
    if what == "exception" and given:
        return "", returned  # users catch them
    if isinstance(given, str) and "~P" in given:
        given = re.sub(r"(\*\*?\w+): ~typing\.~P", r"\1", given)
        given = re.sub(r"\[~typing\.Concatenate\[[^,\]]*, ~P\]\]|\[?~P\]?", "...", given)
    return given, returned


def _overloads(_app: Sphinx, _domain: str, _type: str, content: Any) -> None:
    """Shorten ``~module.Name`` to ``Name`` in signatures of overloads, whose parameters Sphinx may leave as plain text."""
    from docutils import nodes

    for signature in content.parent.children[:-1]:
        for text in signature.findall(nodes.Text):
            plain = re.sub(r"~(?:\w+\.)*~?(\w+)", r"\1", text)
            if plain != text:
                text.parent.replace(text, nodes.Text(plain))


def _complete(_app: Sphinx, environment: Any) -> None:
    from sphinx.util import logging

    there = environment.get_domain("py").objects
    for module in PUBLIC:
        for name, _, _ in _members(module):
            if name not in there:
                logging.getLogger(__name__).warning("%s is public and not in the reference", name)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect this to a build."""
    from docutils import nodes
    from docutils.parsers.rst import Directive
    from docutils.statemachine import StringList

    def directive(text: Any) -> type[Directive]:
        class Generated(Directive):
            required_arguments = 1

            def run(self) -> list[nodes.Node]:
                module = inspect.getsourcefile(_members) or ""
                lines = StringList(list(text(self.arguments[0])), source=os.path.basename(module))
                parent = nodes.section()
                parent.document = self.state.document
                self.state.nested_parse(lines, self.content_offset, parent, match_titles=True)
                return parent.children

        return Generated

    app.add_directive("public-names", directive(_names_text))
    app.connect("autodoc-process-signature", _signature)
    app.connect("autodoc-process-bases", _bases)
    app.connect("object-description-transform", _overloads)
    app.connect("missing-reference", _resolve)
    app.connect("env-check-consistency", _complete)
    return {"parallel_read_safe": True}


if __name__ == "__main__":
    main()
