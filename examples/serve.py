"""A web service over a pool of models: requests are gathered into batches, and new weights can be loaded while it runs.

    python examples/serve.py --port 8000
    curl -d '{"x": [1, 2, 3, 4]}' localhost:8000/predict
    curl -X POST localhost:8000/reload                # the models read their file again, one after the other
    curl localhost:8000/stats
    python examples/serve.py --self-test              # hundreds of requests, two reloads and a killed model meanwhile

The application uses Starlette and runs under uvicorn; each model is an actor. An idle model gets all waiting requests, at most
``--batch``: the busier the service, the larger the batches. A reload goes through a model's mailbox like any call, so each
batch is computed with either the old or the new weights, and a request waits at most for the reload of one model. A model that
dies is restarted, loads the weights from the file, and its batch is computed again.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from torch import Tensor, nn
from tqdm import tqdm

import actorrpc

FEATURES = 4


def make_net() -> nn.Sequential:
    """Return an untrained model."""
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 1))


def write_weights(file: Path, version: int) -> nn.Sequential:
    """Replace the file of weights atomically; return a model with these weights."""
    torch.manual_seed(version)
    net = make_net()
    partly = file.with_suffix(".part")
    torch.save({"version": version, "net": net.state_dict()}, partly)
    partly.rename(file)  # a model that reads at the same time gets the old file or the new one
    return net


@actorrpc.remote(max_restarts=-1, max_task_retries=-1)
class Model:
    """A model in a process of its own."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.net = make_net()
        self.load()

    def load(self) -> int:
        """Read the weights; return their version."""
        found = torch.load(self.file, weights_only=True)
        self.net.load_state_dict(found["net"])
        self.version: int = found["version"]
        return self.version

    @torch.inference_mode()
    def predict(self, x: Tensor) -> tuple[Tensor, int]:
        """Return the answers to a batch, and the version of the weights that gave them."""
        return self.net(x).squeeze(1), self.version


class Service:
    """Gathers requests into batches, and calls the models. For one event loop; ``async with`` starts and ends it.

    Attributes:
        models: the actors.
        sizes: how many batches there were of each size.
    """

    def __init__(self, file: Path, replicas: int, batch: int) -> None:
        self.models = [Model.remote(file) for _ in range(replicas)]
        self.batch = batch
        self.sizes: collections.Counter[int] = collections.Counter()
        self.waiting: asyncio.Queue[tuple[list[float], asyncio.Future[dict[str, Any]]]] = asyncio.Queue()
        self.tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self.tasks = [asyncio.create_task(self.work(model)) for model in self.models]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def work(self, model: actorrpc.ActorHandle[Model]) -> None:
        """Send all waiting requests to a model, repeatedly."""
        while True:
            requests = [await self.waiting.get()]
            while len(requests) < self.batch and not self.waiting.empty():
                requests.append(self.waiting.get_nowait())
            self.sizes[len(requests)] += 1
            try:
                answers, version = await model.predict.remote(torch.tensor([x for x, _ in requests]))
            except Exception as error:
                for _, answer in requests:
                    if not answer.done():  # done: the client has disconnected
                        answer.set_exception(error)
                continue
            for (_, answer), y in zip(requests, answers.tolist(), strict=True):
                if not answer.done():
                    answer.set_result({"y": y, "version": version, "batch": len(requests)})

    async def predict(self, request: Request) -> JSONResponse:
        """Answer one request."""
        try:
            x = [float(number) for number in (await request.json())["x"]]
        except (ValueError, TypeError, KeyError):
            x = []
        if len(x) != FEATURES:
            return JSONResponse({"error": f"x must have {FEATURES} numbers"}, 400)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.waiting.put_nowait((x, answer))
        return JSONResponse(await answer)

    async def reload(self, request: Request) -> JSONResponse:
        """Let the models read the file one after the other, while the others answer requests."""
        return JSONResponse({"versions": [await model.load.remote() for model in self.models]})

    async def stats(self, request: Request) -> JSONResponse:
        """Return the sizes of the batches."""
        return JSONResponse({"batches": dict(sorted(self.sizes.items()))})


def make_app(service: Service) -> Starlette:
    """Return the application."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with service:
            yield

    routes = [
        Route("/predict", service.predict, methods=["POST"]),
        Route("/reload", service.reload, methods=["POST"]),
        Route("/stats", service.stats),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


async def self_test(service: Service, file: Path, requests: int) -> None:
    """Send requests as many clients at once, reload weights and kill a model meanwhile, and check all answers."""
    nets = {1: write_weights(file, 1)}
    dice = torch.Generator().manual_seed(0)
    inputs = torch.randn(requests, FEATURES, generator=dice)
    transport = httpx.ASGITransport(make_app(service))  # calls the application without a socket
    progress = tqdm(total=requests, desc="requests", disable=None)
    begin = time.perf_counter()
    async with (
        service,
        httpx.AsyncClient(transport=transport, base_url="http://service", timeout=60) as client,
    ):
        await client.post("/reload")

        async def ask(x: Tensor) -> dict[str, Any]:
            answer = await client.post("/predict", json={"x": x.tolist()})
            progress.update()
            assert answer.status_code == 200, answer.text
            return {**answer.json(), "x": x}

        asked = []
        for third, part in enumerate(inputs.chunk(3)):
            asked += [asyncio.create_task(ask(x)) for x in part]
            await asked[
                -len(part)
            ]  # now the first request is answered, and others wait or are being computed
            if third == 2:
                actorrpc.kill(service.models[0], no_restart=False)
                break
            nets[third + 2] = write_weights(file, third + 2)
            told = (await client.post("/reload")).json()
            assert set(told["versions"]) == {third + 2}, told
        answers = await asyncio.gather(*asked)
        last = await ask(inputs[0])
        wrong = await client.post("/predict", json={"x": [1, 2]})
        batches = (await client.get("/stats")).json()["batches"]
    progress.close()
    for answer in answers:
        y = nets[answer["version"]](answer["x"]).item()
        assert abs(answer["y"] - y) < 1e-4, (answer, y)
    assert last["version"] == 3, last
    assert wrong.status_code == 400, wrong
    count, largest = sum(batches.values()), max(map(int, batches))
    versions = sorted({answer["version"] for answer in answers})
    print(
        f"self-test: {len(answers)} requests of {requests} answered, all right, in {time.perf_counter() - begin:.2f} s; "
        f"{count} batches of up to {largest}, weights {versions}"
    )


def main() -> int:
    """Start the models and the service."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--replicas", type=int, default=2, help="processes with a model (default 2)")
    parser.add_argument(
        "--batch", type=int, default=32, help="requests that a model gets at a time (default 32)"
    )
    parser.add_argument("--weights", type=Path, help="the file; default: one with weights by chance")
    parser.add_argument("--requests", type=int, default=600, help="of the self-test (default 600)")
    parser.add_argument("--self-test", action="store_true", help="start, ask, compare, end")
    parser.add_argument("--seed", type=int, default=0, help="of weights by chance")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, actorrpc.init():
        file = args.weights or Path(folder, "weights.pt")
        if not file.exists():
            write_weights(file, args.seed)
        service = Service(file.resolve(), args.replicas, args.batch)
        if args.self_test:
            asyncio.run(self_test(service, file, args.requests))
        else:
            uvicorn.run(make_app(service), host="127.0.0.1", port=args.port)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
