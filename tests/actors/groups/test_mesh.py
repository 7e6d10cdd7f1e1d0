"""Meshes, compared with numpy, whose indexing rules they follow."""

from __future__ import annotations

import pickle
import string
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorrpc.actors.groups.mesh import Mesh, Point, ValueMesh
from actorrpc.errors import ConfigError, WrongTypeError

_EXTENTS = st.dictionaries(st.sampled_from(string.ascii_lowercase), st.integers(1, 5), max_size=4)


@st.composite
def _meshes_and_slices(draw: st.DrawFn, steps: int = 3) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Draw the extents of a mesh and slices to be applied one after the other."""
    extents = draw(_EXTENTS)
    shape, slices = dict(extents), []
    for _ in range(draw(st.integers(0, steps))):
        where: dict[str, Any] = {}
        for label, extent in list(shape.items()):
            how = draw(st.sampled_from(["keep", "slice", "index"]))
            if how == "slice":
                where[label] = draw(st.slices(extent))
                shape[label] = len(range(extent)[where[label]])
            elif how == "index" and extent:
                where[label] = draw(st.integers(-extent, extent - 1))
                del shape[label]
        slices.append(where)
    return extents, slices


def _numpy_slice(array: np.ndarray[Any, Any], labels: list[str], where: dict[str, Any]) -> Any:
    index = tuple(where.get(label, slice(None)) for label in labels)
    return array[index], [label for label in labels if isinstance(where.get(label, slice(None)), slice)]


@given(_meshes_and_slices())
def test_slices_select_the_same_ranks_as_numpy(case: tuple[dict[str, int], list[dict[str, Any]]]) -> None:
    extents, slices = case
    mesh, labels = Mesh(extents), list(extents)
    array = np.arange(mesh.size).reshape(tuple(extents.values()))
    for where in slices:
        mesh = mesh.slice(**where)
        array, labels = _numpy_slice(array, labels, where)
    assert list(mesh.labels) == labels
    assert mesh.shape == array.shape
    assert mesh.ndim == array.ndim
    assert mesh.size == len(mesh) == array.size
    assert mesh.origin_ranks == tuple(array.flatten().tolist())
    assert mesh.flatten("n").origin_ranks == mesh.origin_ranks
    assert mesh.flatten("n").extents == {"n": mesh.size}


@given(_meshes_and_slices(1))
def test_ranks_and_coordinates_are_row_major(case: tuple[dict[str, int], list[dict[str, Any]]]) -> None:
    extents, slices = case
    mesh = Mesh(extents)
    for where in slices:
        mesh = mesh(**where)
    places = list(np.ndindex(*mesh.shape)) if mesh.size else []
    assert [point.coords for point in mesh] == places
    for rank, point in enumerate(mesh):
        assert point.rank == rank
        assert dict(point) == dict(zip(mesh.labels, places[rank], strict=True))
        assert mesh.rank_of(**point) == rank
        assert mesh.coords_of(rank) == point == mesh.coords_of(rank - mesh.size)
        assert point.size == mesh.size
        assert point.extents == mesh.extents
        negative = {label: coord - mesh.extents[label] for label, coord in point.items()}
        assert mesh.rank_of(**negative) == rank


@given(_meshes_and_slices(2))
def test_a_value_mesh_is_sliced_like_its_mesh(case: tuple[dict[str, int], list[dict[str, Any]]]) -> None:
    extents, slices = case
    mesh = Mesh(extents)
    values = ValueMesh(mesh, (f"v{rank}" for rank in range(mesh.size)))
    for where in slices:
        mesh, values = mesh.slice(**where), values.slice(**where)
    assert values.mesh == mesh
    assert list(values) == [f"v{rank}" for rank in mesh.origin_ranks]
    assert [values.item(**point) for point in mesh] == list(values)
    assert list(values.items()) == list(zip(mesh, values.values(), strict=True))


def test_slices_with_the_same_extents_differ_if_their_ranks_differ() -> None:
    mesh = Mesh({"a": 2, "b": 3})
    assert mesh.slice(a=0) != mesh.slice(a=1)
    assert mesh.slice(a=0) == mesh(a=0) == mesh.slice(a=-2)
    assert len({mesh.slice(a=0), mesh(a=0), mesh(a=1)}) == 2


@pytest.mark.parametrize(
    ("extents", "error", "words"),
    [
        ({"x": 0}, ConfigError, "at least 1"),
        ({"x": -2}, ConfigError, "at least 1"),
        ({"x": 1.5}, WrongTypeError, "'x'"),
        ({"x": True}, WrongTypeError, "'x'"),
        ({1: 2}, WrongTypeError, "name"),
        ({"": 2}, ConfigError, "name"),
        ({"x": 1 << 13, "y": 1 << 13}, ConfigError, "67108864"),
        ("no", WrongTypeError, "whole number"),
    ],
)
def test_wrong_extents_are_refused(extents: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Mesh(extents)


def test_wrong_ranks_coordinates_and_slices_are_refused() -> None:
    mesh = Mesh({"hosts": 2, "gpus": 4})
    with pytest.raises(ConfigError, match=r"no dimension 'gpu'; it has 'hosts', 'gpus'"):
        mesh.slice(gpu=1)
    with pytest.raises(IndexError, match="gpus=4"):
        mesh.slice(gpus=4)
    with pytest.raises(IndexError, match="gpus=-5"):
        mesh.rank_of(hosts=0, gpus=-5)
    with pytest.raises(ConfigError, match="give gpus"):
        mesh.rank_of(hosts=0)
    with pytest.raises(WrongTypeError, match="gpus"):
        mesh.slice(gpus="all")  # type: ignore[arg-type]
    with pytest.raises(WrongTypeError, match="gpus"):
        mesh.slice(gpus=slice("a", "b"))
    with pytest.raises(ConfigError, match="zero"):
        mesh.slice(gpus=slice(0, 2, 0))
    with pytest.raises(IndexError, match="rank 8"):
        mesh.coords_of(8)
    with pytest.raises(IndexError, match="rank -9"):
        mesh.coords_of(-9)
    with pytest.raises(IndexError, match="rank 8"):
        Point(8, mesh.extents)
    with pytest.raises(WrongTypeError):
        mesh.flatten("")


def test_a_point_is_an_immutable_mapping() -> None:
    point = Mesh({"hosts": 2, "gpus": 4}).coords_of(6)
    assert (point["hosts"], point["gpus"], point.rank) == (1, 2, 6)
    assert {**point} == {"hosts": 1, "gpus": 2}
    assert "hosts" in point
    with pytest.raises(KeyError, match="racks"):
        point["racks"]
    with pytest.raises(TypeError):
        point.extents["hosts"] = 3  # type: ignore[index]
    assert str(point) == "rank 6 (hosts=1, gpus=2)"
    assert hash(point) == hash(Mesh({"hosts": 2, "gpus": 4}).coords_of(6))


def test_meshes_points_and_values_can_be_pickled() -> None:
    mesh = Mesh({"hosts": 2, "gpus": 4}).slice(gpus=slice(None, None, 2))
    assert pickle.loads(pickle.dumps(mesh)) == mesh
    point = mesh.coords_of(3)
    assert pickle.loads(pickle.dumps(point)) == point
    values = ValueMesh(mesh, "abcd")
    assert pickle.loads(pickle.dumps(values)) == values


def test_a_value_mesh_behaves_like_a_sequence() -> None:
    values = ValueMesh(Mesh({"x": 2, "y": 5}), range(10))
    assert (values[3], values[-1], values[2:4], len(values), 7 in values) == (3, 9, (2, 3), 10, True)
    assert sum(values) == 45
    assert list(values.map(str)) == [str(n) for n in range(10)]
    assert repr(values) == "ValueMesh({'x': 2, 'y': 5}: 0, 1, 2, 3, 4, 5, 6, 7, ... 2 more)"
    assert [point["x"] for point in values.points()] == [0] * 5 + [1] * 5
    with pytest.raises(ConfigError, match="3 values"):
        ValueMesh(Mesh(2), "abc")
