"""Inputs for fuzzing: random changes of valid bytes.

All choices come from a seeded generator, so that a failure can be repeated.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

__all__ = ["cut", "mutate"]

_NUMBERS = (0, 1, 2, 31, 32, 127, 128, 200, 254, 255)


def _flip(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data))
    data[at] ^= 1 << rng.randrange(8)


def _replace(rng: random.Random, data: bytearray) -> None:
    data[rng.randrange(len(data))] = rng.choice(_NUMBERS) if rng.random() < 0.5 else rng.randrange(256)


def _truncate(rng: random.Random, data: bytearray) -> None:
    del data[rng.randrange(len(data)) :]


def _drop(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data))
    del data[at : at + rng.randrange(1, 9)]


def _insert(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.randbytes(rng.randrange(1, 40))


def _repeat(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data))
    data[at:at] = data[at : at + rng.randrange(1, 64)] * rng.randrange(1, 5)


def _append(rng: random.Random, data: bytearray) -> None:
    data += rng.randbytes(rng.randrange(1, 600))


def _head(rng: random.Random, data: bytearray) -> None:
    """Change the kind or the length in the head of a handshake message."""
    if len(data) > 5:
        data[rng.choice((4, 5))] = rng.choice((*_NUMBERS, 3, 4, 5, 6, rng.randrange(256)))


def _number(rng: random.Random, data: bytearray) -> None:
    """Overwrite four or eight bytes by an extreme number, for sizes and positions."""
    width = rng.choice((4, 8))
    value = rng.choice(
        (0, 1, 1 << 16, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 64) - 1)
    )
    at = rng.randrange(len(data))
    data[at : at + width] = (value & ((1 << 8 * width) - 1)).to_bytes(width, "little")


_CHANGES: Sequence[Callable[[random.Random, bytearray], None]] = (
    *(_flip, _flip, _replace, _replace, _truncate, _drop, _insert, _repeat, _append, _head, _head, _number),
)


def mutate(rng: random.Random, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """Apply one to four random changes; sometimes insert a part of another input, or return random bytes."""
    if rng.random() < 0.03:
        return rng.randbytes(rng.randrange(700))
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        if not changed:
            break
        if others and rng.random() < 0.15:
            other = rng.choice(others)
            start, at = rng.randrange(len(other) + 1), rng.randrange(len(changed) + 1)
            changed[at : at + rng.choice((0, len(other)))] = other[start:]
        else:
            rng.choice(_CHANGES)(rng, changed)
    return bytes(changed)


def cut(rng: random.Random, data: bytes) -> list[bytes]:
    """Cut bytes into pieces, as a network may."""
    if rng.random() < 0.5:
        return [data]
    pieces, at = [], 0
    while at < len(data):
        size = rng.choice((1, 2, 7, 64, 512))
        pieces.append(data[at : at + size])
        at += size
    return pieces
