"""The program's own modules are sent by value while workers can join the driver, and by name afterwards."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import pytest

from actorrpc.cluster import user_code


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of a script, with modules."""
    for name in ("first_beside", "second_beside", "third_beside"):
        (tmp_path / f"{name}.py").write_text("def f():\n    return 1\n")
    (tmp_path / "package_beside").mkdir()
    (tmp_path / "package_beside" / "__init__.py").write_text("")
    (tmp_path / "package_beside" / "below.py").write_text("")
    real = tmp_path.resolve()
    monkeypatch.syspath_prepend(str(real))
    monkeypatch.setattr(user_code, "directory", lambda: str(real))
    before = cloudpickle.list_registry_pickle_by_value()
    yield real
    user_code.unwatch()
    for name in [each for each in sys.modules if "_beside" in each]:
        del sys.modules[name]
    assert cloudpickle.list_registry_pickle_by_value() == before


def registered() -> list[str]:
    return sorted(cloudpickle.list_registry_pickle_by_value())


def test_modules_are_registered_by_value_while_watched_and_unregistered_afterwards(place: Path) -> None:
    importlib.import_module("first_beside")
    user_code.watch()
    user_code.watch()
    assert registered() == ["first_beside"]
    importlib.import_module("package_beside.below")
    importlib.import_module("second_beside")
    assert registered() == ["first_beside", "package_beside", "package_beside.below", "second_beside"]
    user_code.unwatch()
    assert registered() == []
    user_code.unwatch()
    importlib.import_module("third_beside")
    assert registered() == []
    user_code.watch()
    assert "third_beside" in registered()


def test_modules_that_the_program_registered_stay_registered(place: Path) -> None:
    first = importlib.import_module("first_beside")
    second = importlib.import_module("second_beside")
    cloudpickle.register_pickle_by_value(first)
    try:
        user_code.watch()
        third = importlib.import_module("third_beside")
        # The program unregisters and registers this module itself, so it stays registered.
        cloudpickle.unregister_pickle_by_value(third)
        cloudpickle.register_pickle_by_value(third)
        assert registered() == ["first_beside", "second_beside", "third_beside"]
        user_code.unwatch()
        assert registered() == ["first_beside", "third_beside"]
    finally:
        for each in (first, third):
            cloudpickle.unregister_pickle_by_value(each)
    with pytest.raises(ValueError, match="not registered"):
        cloudpickle.unregister_pickle_by_value(second)
