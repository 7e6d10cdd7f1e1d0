"""The site that Sphinx builds from docs/: links, reference tables, and no requests to other hosts."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from actorrpc import errors
from benchmarks import plots
from tests.test_public_names import _PUBLIC

_DOCS = Path(__file__).resolve().parent.parent / "docs"


def _extension(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, _DOCS / "_ext" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "html",
    [
        '<script src="https://elsewhere/x.js"></script>',
        '<link rel="stylesheet" href="//elsewhere/x.css">',
        '<img src="here.png" srcset="here.png 1x, http://elsewhere/x.png 2x">',
        "<style>@import 'https://elsewhere/x.css';</style>",
        '<p style="background: url(https://elsewhere/x.png)">',
    ],
)
def test_the_check_finds_resources_on_other_hosts(html: str) -> None:
    (found,) = _extension("foreign_requests").foreign_in_html(html)
    assert "elsewhere" in found


def test_a_link_to_a_file_of_the_repository_leads_to_its_page() -> None:
    links = _extension("repository_links")
    page = _DOCS / "how-to" / "tune.md"
    text = "[it](../../SECURITY.md#the-key), [a page](failures.md), [code](../../examples/pipeline.py), [all](../../examples)"
    assert links.on_the_site(text, page, page) == (
        "[it](../security.md#the-key), [a page](failures.md), [code](../../examples/pipeline.py), all"
    )
    shown = links.on_the_site("[limits](docs/limits.md)", _DOCS.parent / "SECURITY.md", _DOCS / "security.md")
    assert shown == "[limits](limits.md)"


def test_pages_that_show_a_file_link_to_it() -> None:
    for page, file in _extension("repository_links").SHOWN.items():
        assert f"(../{file})" in (_DOCS / f"{page}.md").read_text(encoding="utf-8")


def _reference() -> ModuleType:
    return _extension("reference")


def test_every_public_name_is_in_the_reference() -> None:
    """The build fails if autodoc leaves out a name."""
    pages = "".join(path.read_text(encoding="utf-8") for path in (_DOCS / "reference").glob("*.md"))
    shown = re.findall(r"^\.\. public-names:: (\S+)$", pages, re.MULTILINE)
    assert sorted(shown) == sorted(_reference().PUBLIC)


def test_tables_of_the_reference_match_the_code() -> None:
    for path in (_DOCS / "reference").glob("*.md"):
        page = path.read_text(encoding="utf-8")
        assert page == _reference().filled(page), f"run python docs/_ext/reference.py to update {path.name}"


def test_every_public_module_is_in_the_reference() -> None:
    """Exceptions: ``config`` has a page of settings, ``rpc`` lists the names of ``futures``, Ray's names have a table."""
    public = {module for module in _PUBLIC if not module.startswith("actorrpc.compat.ray")}
    assert set(_reference().PUBLIC) == public - {
        "actorrpc.config",
        "actorrpc.futures",
    }


@pytest.mark.parametrize(
    ("target", "option"),
    [
        ("actorrpc.config.Settings", "heartbeat"),
        ("actorrpc.init", "spmd"),
        ("actorrpc.rpc.RpcBackendOptions", "bind"),
        ("actorrpc.actors.ActorOptions", "max_restarts"),
        ("actorrpc.actors.CallOptions", "interrupt"),
        ("actorrpc.actors.TaskOptions", "max_retries"),
        ("actorrpc.supervise", "strategy"),
        ("actorrpc.collective", "backend"),
    ],
)
def test_every_option_has_a_row_with_its_meaning(target: str, option: str) -> None:
    assert f"<!-- options of {target} -->" in (_DOCS / "reference" / "options.md").read_text(encoding="utf-8")
    module, _, name = target.rpartition(".")
    value = getattr(importlib.import_module(module), name)
    rows = {re.split(r"\W", row[0])[0]: row for row in _reference().rows_of(target)}
    assert option in rows
    assert all(meaning for *_, meaning in rows.values())
    if dataclasses.is_dataclass(value):
        assert {field.name for field in dataclasses.fields(value) if field.metadata} <= rows.keys()
    else:
        known = inspect.signature(value).parameters.values()
        assert {each.name for each in known if each.kind is each.KEYWORD_ONLY} <= rows.keys()


def test_every_error_has_a_remedy() -> None:
    named = {name for name, kind in vars(errors).items() if isinstance(kind, type) and name in errors.__all__}
    assert named == set(errors.__all__)
    assert not [name for name in named if "\nRemedy: " not in (inspect.getdoc(getattr(errors, name)) or "")]


def test_llms_txt_lists_the_pages() -> None:
    text = (_DOCS / "llms.txt").read_text(encoding="utf-8")
    listed = set(re.findall(r"\]\(([^)]+)\.html\):", text))
    pages = {
        str(page.relative_to(_DOCS).with_suffix(""))
        for page in _DOCS.rglob("*.md")
        if "_build" not in page.parts
    }
    assert listed == pages - {"index", "reference/index", "benchmarks", "contributing", "changes"}


def test_every_extra_has_a_row_in_install_md() -> None:
    with (_DOCS.parent / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    page = (_DOCS / "how-to" / "install.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == extras.keys()


def test_plots_show_the_recorded_results() -> None:
    """``python -m benchmarks.plots`` draws them; the labels of their bars are text."""
    for name, (file, panels) in plots.FIGURES.items():
        found = plots.medians(file)
        picture = (_DOCS / "images" / f"{name}.svg").read_text(encoding="utf-8")
        shown = re.findall(r">([^<>]+)</text>", picture)
        for panel in panels:
            for bar in panel.bars:
                for peer in panel.peers:
                    value = found[bar.key, peer]["median"] * bar.scale
                    assert plots.label(value) in shown, (name, panel.title, bar.name, peer)


def test_every_picture_is_on_a_page() -> None:
    pages = [_DOCS.parent / "README.md", *_DOCS.rglob("*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages if "_build" not in page.parts)
    assert not [path.name for path in (_DOCS / "images").glob("*.*g") if path.name not in text]
