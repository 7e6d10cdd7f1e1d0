"""A script without ``from __future__ import annotations``. Its annotations name an alias and an import for type checkers."""

import dataclasses
import functools
import inspect
import sys
from typing import TYPE_CHECKING, Any

import actorrpc

if TYPE_CHECKING:
    from nowhere import Missing  # type: ignore[import-not-found]

    Nested = list[Any]
else:
    if sys.version_info < (3, 14):
        Missing = int  # evaluated when the functions below are defined
    if sys.version_info >= (3, 12):
        exec("type Nested = list[Nested | int]")
    else:
        Nested = list[Any]


class Scale:
    def __call__(self, x: Missing) -> Missing:
        return 2 * x


@dataclasses.dataclass
class Point:
    x: int
    y: Missing = 2


@actorrpc.remote
class Model:
    points: list[Point]

    def add(self, point: Point, z: Missing = 3) -> Missing:
        return point.x + point.y + z

    scale = Scale()
    add_five = functools.partialmethod(add, z=5)


def double(x: Missing) -> Missing:
    return 2 * x


def count(x: Nested) -> int:
    return sum(count(each) if isinstance(each, list) else each for each in x)


def annotations_in_a_function() -> Any:
    class Inner:
        point: Point

    return [Inner.__annotations__["point"] is Point, Model.__annotations__ == {"points": list[Point]}]


def main() -> None:
    with actorrpc.init(num_cpus=2):
        model, task = Model.remote(), actorrpc.remote(double)
        refs = [
            model.add.remote(Point(1)),
            model.add_five.remote(Point(1)),
            model.scale.remote(4),
            task.remote(5),
        ]
        assert actorrpc.get(refs) == [6, 8, 8, 10]
        assert actorrpc.get(actorrpc.remote(count).remote([1, [2, [3]]])) == 6
        assert list(inspect.signature(model.add).parameters) == ["point", "z"]
        assert actorrpc.get(actorrpc.remote(annotations_in_a_function).remote()) == [True, True]
    print("sent")


if __name__ == "__main__":
    main()
