"""The words of the code: one term for one thing."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_PACKAGE = _ROOT / "actorrpc"

# Classes of compat/ that have torch's or Ray's names, as those that they are made of have.
_MIRRORED = {
    *("Future", "RRef", "TensorPipeRpcBackendOptions"),
    *("ActorClass", "ActorHandle", "ActorMethod", "ActorPool", "ObjectRef", "ObjectRefGenerator", "Queue"),
    *("RemoteFunction", "RuntimeContext", "ActorDiedError", "ActorUnavailableError", "AuthenticationError"),
    *("ObjectStoreFullError", "PendingCallsLimitExceeded", "RpcError"),
}
# Classes had these names until 0.2 or before.
_RETIRED_CLASSES = {
    *(
        "Anchor",
        "Answering",
        "Begun",
        "Callee",
        "Deadlocks",
        "Family",
        "Guest",
        "Guests",
        "Holder",
        "Kept",
        "Letter",
    ),
    *(
        "LetterEntry",
        "Limbo",
        "Links",
        "Liveness",
        "LoopStation",
        "NoMail",
        "Origin",
        "Parcel",
        "Places",
        "PostOffice",
    ),
    *(
        "Resident",
        "Residents",
        "Roster",
        "Seat",
        "Siblings",
        "Span",
        "Station",
        "Stations",
        "Supervised",
        "Taste",
        "Todo",
    ),
    *("Trip", "Upkeep", "Waiting", "Whole"),
}
# Idioms that name nobody: the comment of a race says which thread does what.
_RETIRED_IDIOMS = re.compile(r"\b(take note|takes note|sees? to it|what waits|whoever)\b", re.IGNORECASE)
# Words of one author for what the field has words for: see docs/explanation/architecture.md.
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


def test_no_two_modules_have_classes_of_one_name() -> None:
    assert not {
        name: sorted(modules)
        for name, modules in _classes().items()
        if len(modules) > 1 and not (name in _MIRRORED and any(m.startswith("compat/") for m in modules))
    }


def test_retired_names_do_not_come_back() -> None:
    assert not _RETIRED_CLASSES & _classes().keys()


def _lines_with(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{path.relative_to(_ROOT)}:{number}: {line.strip()}"
        for path in sorted([*_PACKAGE.rglob("*.py"), *(_ROOT / "docs").rglob("*.md")])
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]


def test_no_idiom_stands_for_a_thread() -> None:
    assert not _lines_with(_RETIRED_IDIOMS)


def test_retired_words_do_not_come_back() -> None:
    assert not _lines_with(_RETIRED_WORDS)
