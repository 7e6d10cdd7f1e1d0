"""The CartPole example on three hosts: the agent on c, observers on all hosts, which restart elsewhere after host b is lost."""

from __future__ import annotations

import json
import socket
import sys
import time
from typing import Any

import cartpole

import actorrpc

_ROUNDS = 60
_LOSE_AT = 20


def where(actor: Any) -> str:
    """Return the host of an actor; runs in it."""
    return socket.gethostname()


def players(agent: Any) -> list[Any]:
    """Return the agent's observers; runs in the agent."""
    return list(agent.observers)


def places(agent: Any) -> list[str]:
    """Return the hosts of the agent's observers; runs in the agent."""
    found: list[str] = actorrpc.get([actorrpc.call(each, where) for each in agent.observers])
    return found


def main() -> None:
    """Train; ask the test to disconnect host b during the training."""
    # Set only the placement. The agent gets the example's module by value, with this change.
    cartpole.Observer = cartpole.Observer.options(labels={"plays": "yes"}, spread=True, max_restarts=-1)  # type: ignore[misc,assignment]
    with actorrpc.init(
        listen=sys.argv[1], num_cpus=4, labels={"plays": "yes"}, rpc_timeout=0, heartbeat=0.5
    ) as context:
        print("listening", context.address, flush=True)
        here = [cartpole.Agent.options(host=host, placement_timeout=60).remote(0, 0) for host in ("b", "c")]
        assert actorrpc.get([actorrpc.call(each, where) for each in here]) == ["b", "c"]
        agent = cartpole.Agent.options(host="c").remote(4, 3)
        before = actorrpc.get(actorrpc.call(agent, places))
        scores: list[float] = []
        failed = 0
        begun = time.monotonic()
        while len(scores) < _ROUNDS:
            lose = len(scores) == _LOSE_AT and not failed
            played = agent.play_round.remote()
            if lose:
                print("lose", flush=True)
                sys.stdin.readline()
            try:
                scores.append(sum(actorrpc.get(played)) / 4)
            except actorrpc.ActorError as error:
                failed += 1
                print("stopped", type(error).__name__, flush=True)
                # The remaining observers finish their games, for which they call the agent. Then start a new round.
                actorrpc.get(
                    [actorrpc.call(each, where) for each in actorrpc.get(actorrpc.call(agent, players))]
                )
                actorrpc.get(agent.begin_round.remote())
            if lose and not failed:  # the round ended before the loss
                failed = -1
        after = actorrpc.get(actorrpc.call(agent, places))
        tenth = _ROUNDS // 6
        figures = {
            "before": before,
            "after": after,
            "failed rounds": failed,
            "first rounds": sum(scores[:tenth]) / tenth,
            "last rounds": sum(scores[-tenth:]) / tenth,
            "seconds": time.monotonic() - begun,
        }
        print("played", json.dumps(figures), flush=True)
    print("done", flush=True)


if __name__ == "__main__":
    main()
