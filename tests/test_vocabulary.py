"""Vocabulary of the code and the docs: class names are unique, and retired names and idioms do not return."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_PACKAGE = _ROOT / "actorrpc"

# Classes of compat/ with torch's or Ray's names, which classes of other folders share.
_MIRRORED = {
    *("Future", "RRef", "TensorPipeRpcBackendOptions"),
    *("ActorClass", "ActorHandle", "ActorMethod", "ActorPool", "ObjectRef", "ObjectRefGenerator", "Queue"),
    *("RemoteFunction", "RuntimeContext", "ActorDiedError", "ActorUnavailableError", "AuthenticationError"),
    *("ObjectStoreFullError", "PendingCallsLimitExceeded", "RpcError"),
}
# Idioms that hide the subject: a comment about a race must name the thread that acts.
_RETIRED_IDIOMS = re.compile(r"\b(take note|takes note|sees? to it|what waits|whoever)\b", re.IGNORECASE)
# Private words for concepts with established names: see docs/explanation/architecture.md.
_RETIRED_WORDS = re.compile(
    r"(?<![a-z])(stations?|seats?|residents?|parcels?|letters?(?!,? digits)|upkeep|crews?|post offices?|guests?"
    r"|roster|obituar\w+|dice)(?![a-z])",
    re.IGNORECASE,
)


def _classes() -> dict[str, set[str]]:
    found = defaultdict(set)
    for path in _PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name].add(str(path.relative_to(_PACKAGE)))
    return found


def test_no_two_modules_have_classes_of_the_same_name() -> None:
    assert not {
        name: sorted(modules)
        for name, modules in _classes().items()
        if len(modules) > 1 and not (name in _MIRRORED and any(m.startswith("compat/") for m in modules))
    }


def _lines_with(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{path.relative_to(_ROOT)}:{number}: {line.strip()}"
        for path in sorted([*_PACKAGE.rglob("*.py"), *(_ROOT / "docs").rglob("*.md")])
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]


def test_retired_idioms_do_not_come_back() -> None:
    assert not _lines_with(_RETIRED_IDIOMS)


def test_retired_words_do_not_come_back() -> None:
    assert not _lines_with(_RETIRED_WORDS)
