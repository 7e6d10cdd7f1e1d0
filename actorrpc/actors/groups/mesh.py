"""Meshes: the members of a group in named dimensions, and slices of them.

Pure geometry: this module does not use actors or calls. All objects are immutable, and therefore thread-safe.

    mesh = Mesh({"hosts": 2, "gpus": 4})
    mesh.rank_of(hosts=1, gpus=2)                   # 6: ranks count in row-major order, the last dimension fastest
    mesh.slice(gpus=slice(0, 2)).origin_ranks       # (0, 1, 4, 5)
    mesh(hosts=0).extents                           # {"gpus": 4}: an index removes its dimension, as in numpy
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, TypeAlias, TypeVar, overload

from actorrpc.errors import ConfigError, WrongTypeError

__all__ = ["Mesh", "Point", "ValueMesh"]

T = TypeVar("T", covariant=True)
S = TypeVar("S")

_Slice: TypeAlias = slice  # in the bodies of the classes, `slice` is a method

# A larger mesh is probably a mistake, and a mesh keeps a tuple of its ranks.
_MAX_SIZE = 1 << 24


def _index(value: Any, what: str) -> int:
    """Return a whole number as an int; numbers of numpy and torch are accepted, bools are not."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise WrongTypeError(f"{what} must be a whole number, not {value!r}")


class Point(Mapping[str, int]):
    """One place in a mesh: a mapping of dimension names to coordinates, with the place's rank.

    Immutable and hashable; equal to a point at the same place in a mesh of the same extents.

    Attributes:
        rank: the number of the place in its mesh, from 0, in row-major order.
        extents: how large the mesh is in each dimension.
    """

    __slots__ = ("_coords", "extents", "rank")

    rank: int
    extents: Mapping[str, int]

    def __init__(self, rank: int, extents: Mapping[str, int]) -> None:
        size = math.prod(extents.values())
        if not 0 <= rank < size:
            raise IndexError(f"rank {rank} is not in a mesh of {size}: {dict(extents)}")
        self.rank = rank
        self.extents = extents if type(extents) is MappingProxyType else MappingProxyType(dict(extents))
        coords: list[int] = []
        for extent in reversed(tuple(self.extents.values())):
            rank, coord = divmod(rank, extent)
            coords.append(coord)
        self._coords = tuple(reversed(coords))

    @property
    def size(self) -> int:
        """How many places the mesh has: the world size."""
        return math.prod(self.extents.values())

    @property
    def coords(self) -> tuple[int, ...]:
        """The coordinates, in the order of the dimensions."""
        return self._coords

    def __getitem__(self, label: str) -> int:
        try:
            return self._coords[list(self.extents).index(label)]
        except ValueError:
            raise KeyError(label) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.extents)

    def __len__(self) -> int:
        return len(self.extents)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Point):
            return NotImplemented
        return self.rank == other.rank and tuple(self.extents.items()) == tuple(other.extents.items())

    def __hash__(self) -> int:
        return hash((self.rank, tuple(self.extents.items())))

    def __reduce__(self) -> tuple[Any, ...]:
        return Point, (self.rank, dict(self.extents))

    def __str__(self) -> str:
        where = ", ".join(f"{label}={coord}" for label, coord in zip(self.extents, self._coords, strict=True))
        return f"rank {self.rank}" + (f" ({where})" if where else "")

    def __repr__(self) -> str:
        return f"<Point {self} of {dict(self.extents)}>"


class Mesh:
    """Places in named dimensions, numbered from 0 in row-major order: the last dimension counts fastest.

    A slice is a mesh of its own, with ranks and coordinates from 0, as a numpy view has its own indices;
    :attr:`origin_ranks` has the ranks of its places in the first mesh.

    Args:
        extents: the dimensions, in order, and their numbers of places (at least 1); or a number, for one
            dimension called ``"rank"``.

    Raises:
        WrongTypeError: a name is not a str, or an extent is not a whole number.
        ConfigError: a name is empty, an extent is below 1, or there would be more than 16 777 216 places.
    """

    __slots__ = ("_extents", "_origin")

    def __init__(self, extents: Mapping[str, int] | int) -> None:
        given: Mapping[str, int] = extents if isinstance(extents, Mapping) else {"rank": extents}
        checked: dict[str, int] = {}
        for label, extent in given.items():
            if not isinstance(label, str):
                raise WrongTypeError(f"a dimension of a mesh must have a name that is a str, not {label!r}")
            if not label:
                raise ConfigError("a dimension of a mesh must have a name that is not empty")
            checked[label] = _index(extent, f"the extent of dimension {label!r}")
            if checked[label] < 1:
                raise ConfigError(f"dimension {label!r} must have at least 1 place, not {extent!r}")
        size = math.prod(checked.values())
        if size > _MAX_SIZE:
            raise ConfigError(
                f"a mesh of {checked} would have {size} places; at most {_MAX_SIZE} are possible"
            )
        self._extents: Mapping[str, int] = MappingProxyType(checked)
        self._origin: tuple[int, ...] = tuple(range(size))

    @classmethod
    def numbered(cls, extents: dict[str, int], origin: tuple[int, ...]) -> Mesh:
        """Return a slice whose :attr:`origin_ranks` are ``origin``. A dimension of it may have no places."""
        mesh = cls.__new__(cls)
        mesh._extents = MappingProxyType(extents)
        mesh._origin = origin
        return mesh

    # -- properties -----------------------------------------------------------------------------------

    @property
    def extents(self) -> Mapping[str, int]:
        """How many places each dimension has, by name, in order."""
        return self._extents

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the dimensions, in order."""
        return tuple(self._extents)

    @property
    def shape(self) -> tuple[int, ...]:
        """How many places each dimension has, in order."""
        return tuple(self._extents.values())

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self._extents)

    @property
    def size(self) -> int:
        """The number of places."""
        return len(self._origin)

    @property
    def origin_ranks(self) -> tuple[int, ...]:
        """For each place, in order of rank, its rank in the mesh from which the first slice was made."""
        return self._origin

    def __len__(self) -> int:
        return len(self._origin)

    def __iter__(self) -> Iterator[Point]:
        """Iterate over the points, in order of rank."""
        return (Point(rank, self._extents) for rank in range(len(self._origin)))

    def rank_of(self, **coords: int) -> int:
        """Return the rank of a place, given all its coordinates (negative coordinates count from the end).

        Raises:
            ConfigError: a dimension is missing, or there is no dimension of that name.
            IndexError: a coordinate is outside its dimension.
        """
        self._check_labels(coords)
        missing = [label for label in self._extents if label not in coords]
        if missing:
            raise ConfigError(f"a place of {self} needs all coordinates: give {', '.join(missing)}, too")
        rank = 0
        for label, extent in self._extents.items():
            rank = rank * extent + self._coord(label, coords[label])
        return rank

    def coords_of(self, rank: int) -> Point:
        """Return the point of a rank (negative ranks count from the end).

        Raises:
            IndexError: there is no such rank.
        """
        wanted = _index(rank, "a rank")
        if not -self.size <= wanted < self.size:
            raise IndexError(f"rank {wanted} is not in {self}, which has {self.size} places")
        return Point(wanted % self.size, self._extents)

    # -- slicing -----------------------------------------------------------------------------------

    def slice(self, **where: int | _Slice) -> Mesh:
        """Return a part of the mesh, by the names of dimensions.

        Args:
            where: for a dimension, an index, which removes the dimension, or a slice, which keeps it (steps and negative
                numbers as in numpy). Other dimensions stay as they are.

        Raises:
            ConfigError: there is no dimension of that name.
            IndexError: an index is outside its dimension.
            WrongTypeError: a value is neither an index nor a slice.
        """
        self._check_labels(where)
        kept: dict[str, int] = {}
        ranks = [0]  # of the chosen places, in the dimensions so far
        for label, extent in self._extents.items():
            wanted = where.get(label, slice(None))
            chosen: Sequence[int]
            if isinstance(wanted, slice):
                try:
                    chosen = range(extent)[wanted]
                except TypeError as error:
                    raise WrongTypeError(f"{wanted} is no slice of dimension {label!r}: {error}") from None
                except ValueError as error:
                    raise ConfigError(f"{wanted} is no slice of dimension {label!r}: {error}") from None
                kept[label] = len(chosen)
            else:
                chosen = (self._coord(label, wanted),)
            ranks = [rank * extent + coord for rank in ranks for coord in chosen]
        return Mesh.numbered(kept, tuple(self._origin[rank] for rank in ranks))

    __call__ = slice

    def flatten(self, label: str = "rank") -> Mesh:
        """Return the same places in one dimension, in order of rank."""
        if not isinstance(label, str) or not label:
            raise WrongTypeError(f"a dimension of a mesh must have a name that is a str, not {label!r}")
        return Mesh.numbered({label: self.size}, self._origin)

    def _coord(self, label: str, value: Any) -> int:
        coord, extent = _index(value, f"the coordinate of {label!r}"), self._extents[label]
        if not -extent <= coord < extent:
            raise IndexError(f"{label}={coord} is outside {self}: {label!r} has {extent} places")
        return coord % extent

    def _check_labels(self, given: Mapping[str, Any]) -> None:
        unknown = [label for label in given if label not in self._extents]
        if unknown:
            raise ConfigError(
                f"{self} has no dimension {', '.join(map(repr, unknown))}; "
                f"it has {', '.join(map(repr, self._extents)) or 'none'}"
            )

    # -- special methods ----------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mesh):
            return NotImplemented
        mine, theirs = tuple(self._extents.items()), tuple(other.extents.items())
        return mine == theirs and self._origin == other.origin_ranks

    def __hash__(self) -> int:
        return hash((tuple(self._extents.items()), self._origin))

    def __reduce__(self) -> tuple[Any, ...]:
        return Mesh.numbered, (dict(self._extents), self._origin)

    def __repr__(self) -> str:
        return f"Mesh({dict(self._extents)})"


class ValueMesh(Generic[T]):
    """One value for each place of a mesh.

    Iterating yields the values in order of rank; ``values[rank]`` and ``values.item(hosts=0, gpus=1)`` return one value.
    Immutable; sliced like a :class:`Mesh`.
    """

    __slots__ = ("_mesh", "_values")

    def __init__(self, mesh: Mesh, values: Iterable[T]) -> None:
        self._mesh = mesh
        self._values = tuple(values)
        if len(self._values) != mesh.size:
            raise ConfigError(f"{mesh} has {mesh.size} places, but there are {len(self._values)} values")

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return self._mesh

    def item(self, **coords: int) -> T:
        """Return the value at a place, given all its coordinates. Errors as for :meth:`Mesh.rank_of`."""
        return self._values[self._mesh.rank_of(**coords)]

    def values(self) -> tuple[T, ...]:
        """Return the values, in order of rank."""
        return self._values

    def items(self) -> Iterator[tuple[Point, T]]:
        """Iterate over ``(point, value)``, in order of rank."""
        return zip(self._mesh, self._values, strict=True)

    def points(self) -> Iterator[Point]:
        """Iterate over the points, in order of rank."""
        return iter(self._mesh)

    def slice(self, **where: int | _Slice) -> ValueMesh[T]:
        """Return the values of a part of the mesh. Arguments and errors as for :meth:`Mesh.slice`."""
        part = Mesh(self._mesh.extents) if self._mesh.size else self._mesh
        chosen = part.slice(**where)
        return ValueMesh(self._mesh.slice(**where), (self._values[rank] for rank in chosen.origin_ranks))

    def map(self, function: Callable[[T], S]) -> ValueMesh[S]:
        """Return the mesh of ``function(value)``."""
        return ValueMesh(self._mesh, map(function, self._values))

    def __iter__(self) -> Iterator[T]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, rank: int) -> T: ...

    @overload
    def __getitem__(self, rank: _Slice) -> tuple[T, ...]: ...

    def __getitem__(self, rank: int | _Slice) -> T | tuple[T, ...]:
        return self._values[rank]

    def __contains__(self, value: object) -> bool:
        return value in self._values

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ValueMesh):
            return NotImplemented
        return self._mesh == other.mesh and self._values == other.values()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = ", ".join(f"{value!r}" for value in self._values[:8])
        more = f", ... {len(self._values) - 8} more" if len(self._values) > 8 else ""
        return f"ValueMesh({dict(self._mesh.extents)}: {shown}{more})"
