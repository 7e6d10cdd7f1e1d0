"""Clusters on three hosts, each with its own addresses, name and files: joined by hand or started by torchrun.

Only host a has the program, so workers on other hosts get its code by value. Then host b is lost, and the program continues.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from actorrpc.testing import processes
from tests import certificates
from tests.cluster.machines import Machines, Program, program
from tests.faults.figures import NIGHTLY, note
from tests.faults.hosts import Network, needs_hosts

_ROOT = Path(__file__).resolve().parents[2]
_RNN = _ROOT / "examples" / "torch_style" / "rnn.py"

pytestmark = [
    needs_hosts,
    pytest.mark.limit(150),
    pytest.mark.prints(
        r"^worker '.*' has (joined|lost its driver at) tcp://", "^threads of 'b' are still in user code"
    ),
]
_nightly = pytest.mark.skipif(not NIGHTLY, reason="ACTORRPC_NIGHTLY is not 1")


def _address(network: Network, host: str) -> str:
    address = network[host].address
    return f"tcp://[{address}]:7777" if ":" in address else f"tcp://{address}:7777"


_VARIANTS: dict[str, tuple[dict[str, str], dict[str, object]]] = {
    "default": ({}, {}),
    "certificates": ({}, {}),
    "plain": ({"ACTORRPC_TLS": "off"}, {}),
    "tcp": ({"ACTORRPC_TRANSPORT": "tcp"}, {"transport": "tcp"}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "variant", "loss"),
    [
        ("ipv6", "default", "power"),
        pytest.param("ipv4", "default", "power", marks=_nightly),
        pytest.param("ipv4", "default", "silence", marks=_nightly),
        pytest.param("ipv6", "default", "link", marks=_nightly),
        pytest.param("ipv4", "plain", "power", marks=_nightly),
        pytest.param("ipv4", "tcp", "power", marks=_nightly),
        pytest.param("ipv4", "certificates", "silence", marks=_nightly),
        pytest.param("ipv6", "plain", "silence", marks=_nightly),
    ],
)
def test_a_cluster_on_three_hosts_keeps_working_after_losing_a_host(
    family: str, variant: str, loss: str
) -> None:
    env, settings = _VARIANTS[variant]
    if variant == "certificates":
        env = certificates.files().environment
    if loss != "power":
        settings = {**settings, "heartbeat": 0.5}
    with (
        Network("a", "b", "c", ipv4=family == "ipv4", ipv6=family == "ipv6") as network,
        Machines(network) as machines,
    ):
        place = program(machines, "a", "across.py", "ours.py", _RNN)
        address = _address(network, "a")
        words = [f"{name}={json.dumps(value)}" for name, value in settings.items()]
        driver = machines.start(
            "a", sys.executable, str(place / "across.py"), address, *words, directory=place, env=env
        )
        joiners = {
            name: machines.join(name, address, "--labels", f"zone=far,name={name}", env=env)
            for name in ("b", "c")
        }
        assert driver.expect("listening") == address
        driver.expect("lose")
        when = machines.lose("b", loss)
        driver.tell(repr(when))
        ends = json.loads(driver.expect("ended"))
        note("a host is lost", {"family": family, "variant": variant, "loss": loss, "ends": ends})
        assert {name: kind for name, (kind, _) in ends.items()} == {
            "actor": "ActorUnavailableError",  # the actor is being restarted on host c
            "call": "PeerDiedError",
        }
        driver.expect("done")
        driver.ends()
        joiners["c"].ends()
        if loss != "power":
            joiners["b"].ends(1)
            assert "'b' has lost its driver at tcp://" in joiners["b"].errors
        machines.are_empty("a", "c")
        machines.are_empty(*(["b"] if loss != "power" else []))


# -- torchrun ---------------------------------------------------------------------------------------------

_RAN = "a 3 ['b', 'c'] [6.0, 6.0, 6.0] [10.0, 10.0]"


@_nightly
@pytest.mark.parametrize(("family", "tls"), [("ipv4", False), ("ipv6", True)])
def test_torchrun_restarts_the_ranks_of_all_hosts_after_a_failure(family: str, tls: bool) -> None:
    with (
        Network("a", "b", "c", ipv4=family == "ipv4", ipv6=family == "ipv6") as network,
        Machines(network) as machines,
    ):
        env = {"ACTORRPC_KEY": "one key for all of the ranks", "ACTORRPC_KEY_FILE": ""}
        if tls:
            env |= certificates.files().environment
        agents = []
        for name in ("a", "b", "c"):
            place = program(machines, name, "launched.py")
            command = (
                f"-m torch.distributed.run --nnodes 3 --nproc-per-node 1 --max-restarts 1 --monitor-interval 0.1 \
                --rdzv-backend c10d --rdzv-id hosts --rdzv-endpoint a:29400 --local-addr {name} launched.py"
            )
            agents.append(machines.start(name, sys.executable, *command.split(), directory=place, env=env))
        assert agents[0].expect("ran") == _RAN
        assert agents[0].expect("lost") == "True"
        assert agents[0].expect("ran") == _RAN
        agents[0].expect("done")
        for agent in agents:
            agent.ends()
        machines.are_empty("a", "b", "c", killed=True)  # torchrun kills its ranks


_WAITING = """
import os, threading, pathlib, actorrpc

with actorrpc.init():
    print("ran", os.environ["WORLD_SIZE"], len(actorrpc.workers()), flush=True)
    if not pathlib.Path("begun").exists():
        pathlib.Path("begun").touch()
        threading.Event().wait()  # until torchrun restarts all ranks
print("done", flush=True)
"""


@pytest.mark.slow
@pytest.mark.prints(
    "Sending process .* closing signal", "waits for 1 of 2 ranks to join", "hostname of the client socket"
)
def test_the_example_of_torchrun_continues_when_a_lost_host_comes_back() -> None:
    with Network("a", "b") as network, Machines(network) as machines:
        env = {"ACTORRPC_KEY": "one key for all of the ranks", "ACTORRPC_KEY_FILE": "", "HEAD": "a:29400"}
        env |= {"NNODES": "1:2", "NPROC": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

        def agent(name: str) -> Program:
            place = program(machines, name, _ROOT / "examples" / "cluster" / "torchrun.sh")
            (place / "pi.py").write_text(_WAITING)
            return machines.start(name, "sh", "torchrun.sh", directory=place, env=env)

        first, lost = agent("a"), agent("b")
        assert first.expect("ran") == "2 2"
        processes.kill(machines.running("b"))
        lost.process.wait()
        again = agent("b")
        assert first.expect("ran") == "2 2"
        first.expect("done")
        first.ends()
        again.ends()
