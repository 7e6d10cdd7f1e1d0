"""A small web service in asyncio whose work is done by actors.

    python examples/asyncio_server.py --port 8000
    curl 'localhost:8000/predict?x=1,2,3,4'        # one of the models answers
    curl 'localhost:8000/count?to=5'               # a stream, line by line, as it comes
    curl localhost:8000/stats                      # the requests that an async actor has counted
    python examples/asyncio_server.py --self-test  # start, send all these requests at once, check the answers, end

ObjectRefs are awaitable and streams can be read by ``async for``: the event loop is never blocked, whatever the
actors do. A client that hangs up in the middle of a stream ends the generator in the actor.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import itertools
import json
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch

import actorrpc

FEATURES = 4


@actorrpc.remote
class Model:
    """A model in a process of its own; its class is like any other."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(FEATURES, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

    @torch.inference_mode()
    def predict(self, x: list[float]) -> float:
        """Return the model's answer to one input.

        Raises:
            ValueError: it has not the right number of features.
        """
        if len(x) != FEATURES:
            raise ValueError(f"x must have {FEATURES} numbers, not {len(x)}")
        return self.net(torch.tensor(x)).item()

    def count(self, to: int) -> Iterator[int]:
        """Yield one number after the other."""
        for number in range(to):
            time.sleep(0.01)  # work
            yield number


@actorrpc.remote
class Stats:
    """Counts requests; its methods run on an event loop, many at a time."""

    def __init__(self) -> None:
        self.requests: collections.Counter[str] = collections.Counter()

    async def note(self, path: str) -> None:
        """Count one more request."""
        self.requests[path] += 1

    async def all(self) -> dict[str, int]:
        """Return the counts."""
        return dict(self.requests)


class Service:
    """Answers requests by asking actors."""

    def __init__(self, replicas: int) -> None:
        self.stats = Stats.remote()
        self.models = itertools.cycle([Model.remote() for _ in range(replicas)])

    async def respond(self, path: str, query: dict[str, str]) -> AsyncGenerator[Any, None]:
        """Return the lines of the answer.

        Raises:
            KeyError: the path or one of its parameters is missing.
            ValueError: a parameter is wrong.
        """
        self.stats.note.remote(path)  # does not wait for the answer
        if path == "/predict":
            x = [float(number) for number in query["x"].split(",")]
            return lines({"y": await next(self.models).predict.remote(x)})
        if path == "/count":
            return self.counted(int(query["to"]))
        if path == "/stats":
            return lines(await self.stats.all.remote())
        raise KeyError(path)

    async def counted(self, to: int) -> AsyncGenerator[Any, None]:
        """Yield the items of a generator in an actor as they arrive."""
        async for item in next(self.models).count.remote(to):
            yield {"n": await item}

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection: one request, one answer."""
        try:
            target = (await reader.readline()).decode("latin-1").split(" ")[1]
            while (await reader.readline()).strip():
                pass  # ignore the headers
            url = urlsplit(target)
            query = {name: values[0] for name, values in parse_qs(url.query).items()}
            try:
                answer, status = await self.respond(url.path, query), "200 OK"
            except KeyError as error:
                answer, status = lines({"error": f"{error.args[0]!r} is missing"}), "404 Not Found"
            except ValueError as error:
                answer, status = lines({"error": str(error).splitlines()[0]}), "400 Bad Request"
            writer.write(f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n".encode())
            writer.write(b"Connection: close\r\n\r\n")
            async with contextlib.aclosing(answer):
                async for line in answer:
                    writer.write(json.dumps(line).encode() + b"\n")
                    await writer.drain()
        except (ConnectionError, IndexError):
            pass  # the client has hung up, or does not speak HTTP
        finally:
            writer.close()


async def lines(*values: Any) -> AsyncGenerator[Any, None]:
    """Yield these values."""
    for value in values:
        yield value


async def fetch(port: int, target: str) -> tuple[int, list[Any]]:
    """Ask the service; return the status and the lines of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    return int(head.split()[1]), [json.loads(line) for line in body.splitlines()]


async def hang_up(port: int, target: str) -> None:
    """Send a request, and close the connection when the answer begins."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {target} HTTP/1.1\r\n\r\n".encode())
    await reader.readuntil(b'{"n": 1}')
    writer.close()
    await writer.wait_closed()


async def self_test(port: int, replicas: int) -> None:
    """Send requests as many clients at once, and check the answers."""
    # Each model begins a stream of a quarter of an hour. If it did not end with its client, all later requests would wait.
    await asyncio.gather(*[hang_up(port, "/count?to=100000") for _ in range(replicas)])
    start = time.perf_counter()
    predictions = [fetch(port, f"/predict?x={number},1,2,3") for number in range(100)]
    *answers, counted, wrong, missing, nowhere = await asyncio.gather(
        *predictions,
        fetch(port, "/count?to=5"),
        fetch(port, "/predict?x=1,2"),
        fetch(port, "/predict"),
        fetch(port, "/nowhere"),
    )
    seconds = time.perf_counter() - start
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(FEATURES, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    for number, (status, lines) in enumerate(answers):
        expected = net(torch.tensor([float(number), 1.0, 2.0, 3.0])).item()
        assert status == 200, lines
        assert abs(lines[0]["y"] - expected) < 1e-4, (lines, expected)
    assert counted == (200, [{"n": number} for number in range(5)]), counted
    assert (wrong[0], missing[0], nowhere[0]) == (400, 404, 404), (wrong, missing, nowhere)
    assert (await fetch(port, "/stats"))[1][0]["/predict"] == 102
    print(f"self-test: {len(answers) + 4} requests at once in {seconds:.2f} s, all answers right")


async def serve(args: argparse.Namespace) -> None:
    """Run the service until it is cancelled (Ctrl-C), or through its self-test."""
    service = Service(args.replicas)
    server = await asyncio.start_server(service.handle, "127.0.0.1", args.port)
    async with server:
        port = server.sockets[0].getsockname()[1]
        if args.self_test:
            await self_test(port, args.replicas)
        else:
            print(f"serving on http://127.0.0.1:{port}/", flush=True)
            await server.serve_forever()


def main() -> int:
    """Start the actors and the service."""
    parser = argparse.ArgumentParser(description="A small web service whose work is done by actors.")
    parser.add_argument("--port", type=int, default=0, help="0, the default: one that is free")
    parser.add_argument("--replicas", type=int, default=2, help="processes with a model (default 2)")
    parser.add_argument("--self-test", action="store_true", help="start, ask, compare, end")
    args = parser.parse_args()
    with actorrpc.init():
        asyncio.run(serve(args))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
