"""Reinforcement learning with batched actions: one forward pass of the policy serves all observers.

Each observer asks the agent for the next action at every step of its game. The agent waits until all have
asked, decides for them together and answers all: ``select_action_batch`` returns a future
(``@rpc.functions.async_execution``), so no thread of the agent waits meanwhile. It saves a forward pass per
observer and step; with a policy on a GPU, or larger than this one, that is nearly all the agent does.

    python batch_reinforce.py                     # on actorrpc: one agent, three observers
    python batch_reinforce.py --no-batch          # one forward pass for each request, for comparison
    python batch_reinforce.py --backend torch     # the same program on torch.distributed.rpc

An observer plays for a fixed number of steps in each round, game after game, so that all ask equally often.
A training depends on the seed alone: both backends play the same games. (``reinforce.py`` is the plain form.)
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

import actorrpc.rpc as rpc

ENVIRONMENT = "CartPole-v1"
AGENT_NAME = "agent"
OBSERVER_NAME = "observer{}"


def use_torch() -> None:
    """Give the name ``rpc`` to torch's own RPC. The mark of async_execution below means the same to both."""
    global rpc
    import torch.distributed.rpc as rpc


class Policy(nn.Module):
    """Two layers that turn states into the log-probabilities of pushing the cart left and right."""

    def __init__(self, hidden: int = 128) -> None:
        super().__init__()
        self.affine1 = nn.Linear(4, hidden)
        self.affine2 = nn.Linear(hidden, 2)

    def forward(self, states: Tensor) -> Tensor:
        """Return the log-probabilities; the last dimension is that of the state, others are batches."""
        return torch.log_softmax(self.affine2(torch.relu(self.affine1(states))), dim=-1)


class Observer:
    """Owns one environment and plays in it, asking the agent what to do."""

    def __init__(self, seed: int, batch: bool) -> None:
        self.id: int = rpc.get_worker_info().id - 1
        self.select_action = Agent.select_action_batch if batch else Agent.select_action
        self.env = gym.make(ENVIRONMENT)
        # Only the first reset is seeded: a seed in each would replay one and the same start.
        self.env.reset(seed=seed + self.id)

    def run_episode(self, agent_rref: Any, n_steps: int) -> list[int]:
        """Play for so many steps; return how long each game was, the last one as far as it came."""
        lengths = [0]
        state, _ = self.env.reset()
        for _ in range(n_steps):
            action = rpc.rpc_sync(
                agent_rref.owner(), self.select_action, args=(agent_rref, self.id, torch.from_numpy(state))
            )
            state, _, terminated, truncated, _ = self.env.step(action)
            lengths[-1] += 1
            if terminated or truncated:
                state, _ = self.env.reset()
                lengths.append(0)
        return [length for length in lengths if length]


class Agent:
    """Holds the policy, lets all observers play, and learns from their games."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        torch.manual_seed(args.seed)
        self.policy = Policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=args.lr)

        self.agent_rref = rpc.RRef(self)
        infos = [rpc.get_worker_info(OBSERVER_NAME.format(rank)) for rank in range(1, args.world_size)]
        self.ob_rrefs = [rpc.remote(info, Observer, args=(args.seed, args.batch)) for info in infos]
        # Random numbers, states and actions of each observer: only that observer's requests use them.
        self.dice = [random.Random(f"{args.seed}/{index}") for index in range(len(infos))]
        self.states: list[list[Tensor]] = [[] for _ in infos]
        self.actions: list[list[int]] = [[] for _ in infos]

        self.lock = threading.Lock()  # guards what follows
        self.pending_states = len(infos)
        self.future_actions: torch.futures.Future[list[int]] = torch.futures.Future()

    @staticmethod
    @rpc.functions.async_execution
    def select_action_batch(agent_rref: Any, ob_id: int, state: Tensor) -> Any:
        """Take an observer's state; return the future of its action, which comes once all have asked."""
        self = agent_rref.local_value()
        self.states[ob_id].append(state)
        with self.lock:
            all_actions = self.future_actions
            future_action = all_actions.then(lambda future: future.wait()[ob_id])
            self.pending_states -= 1
            last = self.pending_states == 0
            if last:
                self.pending_states = len(self.ob_rrefs)
                self.future_actions = torch.futures.Future()
        if last:  # all observers wait for their answers, so no other thread runs this code
            all_actions.set_result(self.draw(torch.stack([states[-1] for states in self.states])))
        return future_action

    @staticmethod
    def select_action(agent_rref: Any, ob_id: int, state: Tensor) -> int:
        """Take an observer's state; return its action at once."""
        self = agent_rref.local_value()
        self.states[ob_id].append(state)
        action: int = self.draw(state.unsqueeze(0), ob_id)[0]
        return action

    def draw(self, states: Tensor, first: int = 0) -> list[int]:
        """Draw actions for the states of some observers, of which this is the first."""
        with torch.no_grad():
            lefts = self.policy(states)[:, 0].exp().tolist()
        actions = []
        for ob_id, left in enumerate(lefts, first):
            actions.append(0 if self.dice[ob_id].random() < left else 1)
            self.actions[ob_id].append(actions[-1])
        return actions

    def run_episode(self) -> list[int]:
        """Let all observers play at the same time, and learn; return how long their games were."""
        futures = [
            ob_rref.rpc_async(timeout=0).run_episode(self.agent_rref, self.args.steps)
            for ob_rref in self.ob_rrefs
        ]
        lengths = [future.wait() for future in futures]

        # Every step earns 1, so the returns depend only on the length of the game.
        games = [length for played in lengths for length in played]
        returns = torch.cat([self.discounted(length).flip(0) for length in games])
        advantages = (returns - returns.mean()) / (returns.std() + 1e-6)
        states = torch.stack([state for played in self.states for state in played])
        actions = torch.tensor(self.actions).flatten()
        chosen = self.policy(states).gather(1, actions.unsqueeze(1)).squeeze(1)
        self.optimizer.zero_grad()
        (-(chosen * advantages).mean()).backward()
        self.optimizer.step()

        self.states = [[] for _ in self.states]
        self.actions = [[] for _ in self.actions]
        return games

    def discounted(self, length: int) -> Tensor:
        """Return the discounted sums of 1, 2, ... rewards of 1."""
        return (self.args.gamma ** torch.arange(length)).cumsum(0)


def train(args: argparse.Namespace) -> None:
    """Train and tell how it goes; runs on the agent."""
    agent = Agent(args)
    rewards: list[float] = []
    start = time.perf_counter()
    for episode in range(1, args.episodes + 1):
        games = agent.run_episode()
        rewards.append(sum(games) / len(games))
        print(f"episode {episode:3d}  mean reward of {len(games):3d} games {rewards[-1]:5.1f}", flush=True)
    seconds = time.perf_counter() - start
    env_steps = args.episodes * args.steps * (args.world_size - 1)
    if args.json:
        result = {"backend": args.backend, "steps_per_second": env_steps / seconds, "rewards": rewards}
        print(json.dumps(result), flush=True)
    else:
        how = "batched" if args.batch else "one by one"
        print(
            f"{env_steps} environment steps in {seconds:.1f} s, {how}: "
            f"{env_steps / seconds:.0f} steps/s on {args.backend}",
            flush=True,
        )


def run_worker(rank: int, args: argparse.Namespace) -> None:
    """Be one member of the group: the agent on rank 0, an observer on any other rank."""
    if args.backend == "torch":
        use_torch()
    torch.set_num_threads(1)
    name = AGENT_NAME if rank == 0 else OBSERVER_NAME.format(rank)
    rpc.init_rpc(name, rank=rank, world_size=args.world_size)
    if rank == 0:
        train(args)
    # Waits until all members are here; until then the observers serve calls.
    rpc.shutdown()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(
        description=f"Learn {ENVIRONMENT} with an agent that selects actions in batches.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--backend", choices=("actorrpc", "torch"), default="actorrpc", help="which RPC to run on")
    add("--world_size", type=int, default=4, help="processes: one agent, the rest observers")
    add("--episodes", type=int, default=30, help="rounds; the agent learns after each")
    add("--steps", type=int, default=500, help="steps that each observer plays in a round")
    add("--batch", action=argparse.BooleanOptionalAction, default=True, help="select actions in batches")
    add("--gamma", type=float, default=0.99, help="discount factor")
    add("--lr", type=float, default=1e-2, help="learning rate of Adam")
    add("--seed", type=int, default=543)
    add("--json", action="store_true", help="print the outcome as one line of JSON")
    args = parser.parse_args(argv)
    if args.world_size < 2:
        parser.error("--world_size: an agent and an observer make 2")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Start all processes of the group and wait for them; return the exit status."""
    args = parse(argv)
    os.environ.setdefault("MASTER_ADDR", "localhost")
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        os.environ.setdefault("MASTER_PORT", str(probe.getsockname()[1]))
    try:
        spawn(run_worker, args=(args,), nprocs=args.world_size)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
