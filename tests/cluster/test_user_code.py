"""The program's own modules: which travel by value while a driver can be joined, and which do afterwards."""

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
    """The directory of a script, with modules in it."""
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


def test_all_that_we_registered_is_undone(place: Path) -> None:
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


def test_what_the_program_registered_stays(place: Path) -> None:
    first = importlib.import_module("first_beside")
    second = importlib.import_module("second_beside")
    cloudpickle.register_pickle_by_value(first)
    try:
        user_code.watch()
        third = importlib.import_module("third_beside")
        # It changes its mind about one of ours: from then on that is its own.
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


def test_a_program_may_unregister_what_we_registered(place: Path) -> None:
    first = importlib.import_module("first_beside")
    user_code.watch()
    cloudpickle.unregister_pickle_by_value(first)
    assert registered() == []
    user_code.unwatch()


def test_an_import_that_fails(place: Path) -> None:
    (place / "broken_beside.py").write_text("raise RuntimeError('broken')\n")
    user_code.watch()
    with pytest.raises(RuntimeError, match="broken"):
        importlib.import_module("broken_beside")
    user_code.unwatch()
    assert registered() == []
