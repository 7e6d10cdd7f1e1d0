"""The remote end of a simulated connection: it reads, replies and calls in raw frames, in pieces of random size."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import random
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from actorrpc.agent import outbound
from actorrpc.wire import frames
from actorrpc.wire.frames import Frame, FrameReader, pack_frame, unpack_header

__all__ = ["RemoteEnd"]


class RemoteEnd:
    """The remote end. It acts only when one of its methods is called.

    Args:
        functions: functions that it may call, with the number of the call as argument. A function listed twice is
            called twice as often.
    """

    def __init__(
        self, sock: socket.socket, dice: random.Random, functions: Sequence[Callable[[int], int]]
    ) -> None:
        self._functions = functions
        self._sock = sock
        self._dice = dice
        self._reader = FrameReader(max_frame=1 << 20, max_chunk=1 << 20, sink_for=self._sink)
        self._streams: dict[int, list[Any]] = {}  # stream -> id of the call, number of missing bytes
        self._out = b""
        self._written = self._put = 0
        self._ends: deque[tuple[int, int]] = (
            deque()
        )  # for each reply: its end position in the output, id of the call
        self.unanswered: list[int] = []
        self.answered: set[int] = set()  # calls whose reply has been written completely
        self.open_calls: set[int] = set()
        self._ids = itertools.count(1)
        self.pongs = 0

    def _sink(self, stream: int, position: int, length: int) -> memoryview:
        return memoryview(bytearray(length))

    def read(self) -> bool:
        """Read some bytes; return whether there were any."""
        size = self._dice.choice((1, 40, 2_000, 1 << 18))
        target = self._reader.target()[0][:size]
        try:
            count = self._sock.recv_into(target, 0, socket.MSG_DONTWAIT)
        except (BlockingIOError, ConnectionError):
            return False
        for frame in self._reader.fed(count) if count else ():
            self._take(frame)
        while self._reader.more:
            for frame in self._reader.fed(0):
                self._take(frame)
        return bool(count)

    def _take(self, frame: Frame) -> None:
        match frame.kind:
            case frames.REQUEST if frame.flags & outbound.STREAM:
                header = unpack_header(frame.extra)
                self._streams[header["stream"]] = [frame.id, sum(header["sizes"])]
            case frames.REQUEST:
                self.unanswered.append(frame.id)
            case frames.CHUNK:
                begun = self._streams[frame.id]
                begun[1] -= frame.flags
                if not begun[1]:
                    del self._streams[frame.id]
                    self.unanswered.append(begun[0])
            case frames.STREAM_ABORT:
                self._streams.pop(frame.id, None)
            case frames.REPLY | frames.FAILURE:
                self.open_calls.remove(frame.id)
            case frames.PONG:
                self.pongs += 1
            case frames.CANCEL | frames.GOODBYE:
                pass
            case _:
                raise AssertionError(frame)

    def answer(self) -> None:
        """Answer a random call."""
        if self.unanswered:
            self.unanswered.sort()
            number = self.unanswered.pop(self._dice.randrange(len(self.unanswered)))
            if not self._dice.randrange(3):
                self._enqueue(pack_frame(frames.CREDIT, number))
            self._enqueue(pack_frame(frames.REPLY, number, pickle.dumps(number, 5)))
            self._ends.append((self._put, number))

    def make_call(self) -> None:
        """Make a call."""
        number = next(self._ids)
        function = self._dice.choice(self._functions)
        self.open_calls.add(number)
        self._enqueue(pack_frame(frames.REQUEST, number, pickle.dumps((function, (number,), {}), 5)))

    def ping(self) -> None:
        self._enqueue(pack_frame(frames.PING, 7))

    def _enqueue(self, data: bytes) -> None:
        self._out += data
        self._put += len(data)

    def write(self) -> bool:
        """Write some of the queued bytes; return whether there were any."""
        if not self._out:
            return False
        with contextlib.suppress(BlockingIOError, ConnectionError):
            size = self._dice.choice((1, 31, 33, 400, 1 << 20, 1 << 20))
            count = self._sock.send(self._out[:size], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            self._out = self._out[count:]
            self._written += count
            while self._ends and self._ends[0][0] <= self._written:
                self.answered.add(self._ends.popleft()[1])
            return True
        return False

    def close(self) -> None:
        self._sock.close()
