"""The packets between workers on two hosts that have only a key: all are TLS, and nothing can be read in them."""

from __future__ import annotations

import re
import socket
import struct
import sys
from collections.abc import Iterator

import pytest
import torch

from actorrpc import rpc
from actorrpc.agent.context import current_worker
from tests.cluster.machines import Machines
from tests.faults.hosts import Host, Network, host_group, needs_hosts
from tests.intruders.doors import tls_records

pytestmark = needs_hosts

_NAMES = ("hostalpha", "hostbravo")
_STORE = 29400  # torch's store is not encrypted
_ALL_PACKETS, _IPV4, _SYN = 3, 0x0800, 2
_HANDSHAKE, _DATA = 22, 23  # kinds of TLS records
_SOL_PACKET, _STATISTICS, _SO_RCVBUFFORCE = 263, 6, 33
_Stream = tuple[bytes, int, bytes, int]  # address and port of the sender, and of the receiver


class _Capture:
    """Records the packets that a host sends and receives. A context manager."""

    def __init__(self, host: Host) -> None:
        self._sock = host.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(_ALL_PACKETS))
        self._sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 64 << 20)
        self._sock.bind(("eth0", _ALL_PACKETS))
        self._sock.setblocking(False)

    def __enter__(self) -> _Capture:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()

    def streams(self) -> dict[_Stream, bytes]:
        """Return the bytes of each direction of each TCP connection."""
        first: dict[_Stream, int] = {}
        pieces: dict[_Stream, list[tuple[int, bytes]]] = {}
        for packet in self._packets():
            head, size = (packet[0] & 15) * 4, int.from_bytes(packet[2:4], "big")
            port, to, number = struct.unpack_from("!HHI", packet, head)
            stream = (packet[12:16], port, packet[16:20], to)
            if packet[head + 13] & _SYN:
                first[stream] = number + 1
            if body := packet[head + (packet[head + 12] >> 4) * 4 : size]:
                pieces.setdefault(stream, []).append(((number - first[stream]) % 2**32, body))
        dropped = struct.unpack("II", self._sock.getsockopt(_SOL_PACKET, _STATISTICS, 8))[1]
        assert not dropped
        return {stream: _joined(each) for stream, each in pieces.items()}

    def _packets(self) -> Iterator[bytes]:
        while True:
            try:
                packet, (_, kind, *_) = self._sock.recvfrom(1 << 17)
            except BlockingIOError:
                return
            if kind == _IPV4 and packet[9] == socket.IPPROTO_TCP:
                yield packet


def _joined(pieces: list[tuple[int, bytes]]) -> bytes:
    data = bytearray()
    for at, piece in sorted(pieces):
        assert at <= len(data)  # otherwise a packet was not captured
        data[at : at + len(piece)] = piece
    return bytes(data)


def _readable(streams: dict[_Stream, bytes], words: list[str]) -> set[str]:
    """Return the words that occur in the streams, and ``handshake`` for a message of the handshake of this package."""
    found = {word for word in words for stream in streams.values() if word.encode() in stream}
    return found | {"handshake" for stream in streams.values() if re.search(rb"aRPC[\x01-\x05]", stream)}


def _assert_encrypted(streams: dict[_Stream, bytes], words: list[str]) -> None:
    assert len(streams) >= 2
    for stream in streams.values():
        kinds = tls_records(stream)
        assert kinds[0] == _HANDSHAKE
        assert _DATA in kinds
    assert not _readable(streams, words)


class SecretLedger:
    """Lives on the other host."""

    def secret_method(self, argument: str, numbers: torch.Tensor) -> tuple[str, torch.Tensor]:
        """Return a text that contains the argument, and a tensor."""
        return f"secret result of {argument}", numbers + 1


def _secret_error() -> None:
    raise ValueError("secret error")


_NUMBER = 0x5345_4352_4554_5450  # as bytes: PTTERCES
_WORDS = [
    *("SecretLedger", "secret_method", "secret argument", "secret result", "_secret_error", "secret error"),
    *("PTTERCES", "test_capture", "worker0", "worker1"),
]


def _call_the_other_host(rank: int, world_size: int) -> str:
    other = f"worker{1 - rank}"
    ledger = rpc.remote(other, SecretLedger)
    numbers = torch.full((10_000,), _NUMBER)  # large enough to be sent in chunks
    text, found = ledger.rpc_sync().secret_method("secret argument", numbers)
    assert (text, found[0].item()) == ("secret result of secret argument", _NUMBER + 1)
    with pytest.raises(ValueError, match="secret error"):
        rpc.rpc_sync(other, _secret_error)
    worker = current_worker()
    assert worker is not None
    return worker.agent.record.host


@pytest.mark.parametrize("tls", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_between_hosts_of_a_group_everything_is_encrypted_unless_tls_is_off(tls: bool) -> None:
    with Network(*_NAMES) as network, _Capture(network[_NAMES[0]]) as capture:
        records = host_group(_call_the_other_host, network, _NAMES, options={"tls": tls})
        streams = {stream: data for stream, data in capture.streams().items() if _STORE not in stream}
    assert sum(map(len, streams.values())) > 2 * 8 * 10_000
    if tls:
        _assert_encrypted(streams, [*_WORDS, *_NAMES, *records])
    else:
        assert _readable(streams, [*_WORDS, *records]) == {*_WORDS, *records, "handshake"}


_DRIVER = """
import sys, actorrpc

@actorrpc.remote
class SecretLedger:
    def secret_method(self, argument):
        return "secret result of " + argument

with actorrpc.init(listen=sys.argv[1], num_cpus=1):
    print("listening", flush=True)
    ledger = SecretLedger.options(host="hostbravo", placement_timeout=60).remote()
    print("called", actorrpc.get(ledger.secret_method.remote("secret argument")), flush=True)
"""


@pytest.mark.slow
@pytest.mark.prints("^worker '.*' has joined tcp://")
def test_between_hosts_of_a_cluster_everything_is_encrypted() -> None:
    with (
        Network(*_NAMES) as network,
        Machines(network) as machines,
        _Capture(network[_NAMES[0]]) as capture,
    ):
        address = f"tcp://{network[_NAMES[0]].address}:7777"
        driver = machines.start(_NAMES[0], sys.executable, "-c", _DRIVER, address)
        driver.expect("listening")
        worker = machines.join(_NAMES[1], address)
        assert driver.expect("called") == "secret result of secret argument"
        driver.ends()
        worker.ends()
        streams = capture.streams()
    words = ["SecretLedger", "secret_method", "secret argument", "secret result", "driver", *_NAMES]
    assert any(7777 in stream for stream in streams)
    _assert_encrypted(streams, words)
