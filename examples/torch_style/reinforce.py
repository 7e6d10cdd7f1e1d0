"""Reinforcement learning over RPC: one agent learns to balance a pole, observers play the games.

Rank 0 holds the agent and its policy; every other rank holds an observer with an environment of its
own. In each round the agent asks all observers to play one episode, and each observer calls *back*,
through the agent's RRef, twice for every step: ``select_action`` and ``report_reward``. So the calls
are nested (agent -> observer -> agent) and there are two of them per environment step, which makes
this program a measure of what a small RPC costs.

    python reinforce.py                       # on actorrpc
    python reinforce.py --backend torch       # the same program on torch.distributed.rpc

The learning is REINFORCE. A game is a function of the seed alone, however the calls of different
observers interleave: both backends play the same episodes and draw the same learning curve.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

__all__ = ["Agent", "Observer", "Policy", "Progress", "Result", "main"]

BACKENDS = {"actorrpc": "actorrpc.rpc", "torch": "torch.distributed.rpc"}
ENVIRONMENT = "CartPole-v1"
AGENT_NAME = "agent"
OBSERVER_NAME = "observer{}"

# The RPC module, chosen by --backend. Each process sets it in run_worker(), before it makes any object.
rpc: Any = None


class Policy(nn.Module):
    """Two layers that turn a state into the log-probabilities of pushing the cart left and right."""

    def __init__(self, hidden: int = 128) -> None:
        super().__init__()
        self.affine1 = nn.Linear(4, hidden)
        self.affine2 = nn.Linear(hidden, 2)
        # The same memory as the parameters, but outside autograd: for choosing actions.
        self.weights = tuple(parameter.detach() for parameter in self.parameters())

    def forward(self, states: Tensor) -> Tensor:
        """Return the log-probabilities of the actions for a batch of states."""
        scores: Tensor = self.affine2(torch.relu(self.affine1(states)))
        return torch.log_softmax(scores, dim=1)

    def chance_of_left(self, state: Sequence[float]) -> float:
        """Return the probability of action 0 in one state: forward() without its overheads."""
        w1, b1, w2, b2 = self.weights
        hidden = torch.addmv(b1, w1, torch.tensor(state)).relu_()
        return torch.addmv(b2, w2, hidden).softmax(0)[0].item()


class Observer:
    """Own one environment and play episodes in it, asking the agent what to do."""

    def __init__(self, seed: int) -> None:
        self.id: int = rpc.get_worker_info().id
        self.env = gym.make(ENVIRONMENT)
        # Only the first reset is seeded: a seed in each would replay one and the same start.
        self.env.reset(seed=seed + self.id)

    def run_episode(self, agent_rref: Any) -> None:
        """Play one episode, with two calls to the agent per step."""
        state, _ = self.env.reset()
        ended = False
        while not ended:
            # Plain floats: a list of four pickles in a tenth of the time of a numpy array of four.
            action = agent_rref.rpc_sync().select_action(self.id, state.tolist())
            state, reward, terminated, truncated, _ = self.env.step(action)
            agent_rref.rpc_sync().report_reward(self.id, float(reward))
            ended = terminated or truncated


@dataclass(slots=True)
class Episode:
    """The steps of one observer in the current round, and the random numbers for its actions.

    Only calls of that observer use this object during a round, one after the other. Therefore
    concurrent observers need no lock, and do not change each other's random numbers.
    """

    dice: random.Random
    states: list[Sequence[float]] = field(default_factory=list)
    actions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    def returns(self, gamma: float) -> Tensor:
        """Return the discounted sum of the rewards to come, for each step."""
        total = 0.0
        backwards = []
        for reward in reversed(self.rewards):
            total = reward + gamma * total
            backwards.append(total)
        return torch.tensor(backwards[::-1])

    def clear(self) -> None:
        """Discard the steps, and keep the random numbers."""
        self.states.clear()
        self.actions.clear()
        self.rewards.clear()


class Baseline:
    """A moving average of the return at each time step; the advantage of a step is what exceeds it.

    An episode that ended before a step counts there with a return of zero. Advantages are scaled by
    their own moving size plus a constant: with a good policy they are close to zero, and scaling them
    to full size again would make the policy worse.
    """

    def __init__(self, steps: int, *, momentum: float = 0.8, constant: float = 3.0) -> None:
        self.momentum = momentum
        self.constant = constant
        self.mean = torch.zeros(steps)
        self.variance: Tensor | None = None

    def advantages(self, returns: Sequence[Tensor]) -> Tensor:
        """Return the scaled advantages of all steps of a round, then learn from its returns."""
        advantages = torch.cat([episode - self.mean[: len(episode)] for episode in returns])
        variance = advantages.square().mean()
        self.variance = variance if self.variance is None else torch.lerp(variance, self.variance, 0.9)
        for episode in returns:
            self.mean *= self.momentum
            self.mean[: len(episode)] += (1 - self.momentum) * episode
        return advantages / (self.variance.sqrt() + self.constant)


class Agent:
    """Hold the policy, let all observers play, and learn from what they report."""

    def __init__(self, world_size: int, *, gamma: float, seed: int) -> None:
        spec = gym.spec(ENVIRONMENT)
        assert spec.max_episode_steps is not None
        assert spec.reward_threshold is not None
        self.reward_threshold = spec.reward_threshold
        self.gamma = gamma
        torch.manual_seed(seed)
        self.policy = Policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=1e-2)
        self.baseline = Baseline(spec.max_episode_steps)
        self.running_reward = 0.0

        self.agent_rref = rpc.RRef(self)
        self.ob_rrefs = []
        self.episodes: dict[int, Episode] = {}
        for rank in range(1, world_size):
            ob_info = rpc.get_worker_info(OBSERVER_NAME.format(rank))
            self.ob_rrefs.append(rpc.remote(ob_info, Observer, args=(seed,)))
            self.episodes[ob_info.id] = Episode(random.Random(f"{seed}/{ob_info.id}"))

    def select_action(self, ob_id: int, state: Sequence[float]) -> int:
        """Draw an action from the policy; called by the observers.

        This builds no autograd graph. The gradient is that of the log-probability of the chosen
        action, which finish_episode() computes for all steps of a round in one batch.
        """
        episode = self.episodes[ob_id]
        action = 0 if episode.dice.random() < self.policy.chance_of_left(state) else 1
        episode.states.append(state)
        episode.actions.append(action)
        return action

    def report_reward(self, ob_id: int, reward: float) -> None:
        """Take the reward of an observer's latest action; called by the observers."""
        self.episodes[ob_id].rewards.append(reward)

    def run_episode(self) -> None:
        """Let every observer play one episode, all at the same time."""
        futures = [
            rpc.rpc_async(ob_rref.owner(), ob_rref.rpc_sync().run_episode, args=(self.agent_rref,))
            for ob_rref in self.ob_rrefs
        ]
        for future in futures:
            future.wait()

    def finish_episode(self) -> list[float]:
        """Improve the policy with what the observers reported; return the reward of each."""
        episodes = list(self.episodes.values())
        rewards = [sum(episode.rewards) for episode in episodes]
        self.running_reward = 0.95 * self.running_reward + 0.05 * sum(rewards) / len(rewards)

        states = torch.tensor([state for episode in episodes for state in episode.states])
        actions = torch.tensor([action for episode in episodes for action in episode.actions])
        advantages = self.baseline.advantages([episode.returns(self.gamma) for episode in episodes])
        chosen = self.policy(states).gather(1, actions.unsqueeze(1)).squeeze(1)
        loss = -(chosen * advantages).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

        for episode in episodes:
            episode.clear()
        return rewards


@dataclass(slots=True)
class Result:
    """The outcome of a training; an episode is counted once, however many observers play it."""

    backend: str
    seconds: float
    env_steps: int
    steps_per_second: float
    episodes: int
    solved: bool
    running_reward: float

    def __str__(self) -> str:
        outcome = "solved" if self.solved else "not solved"
        return (
            f"{outcome} after {self.episodes} episodes: running reward {self.running_reward:.1f}; "
            f"{self.env_steps} environment steps in {self.seconds:.1f} s on {self.backend}, "
            f"{self.steps_per_second:.0f} steps/s"
        )


class Progress:
    """Show how far the training is: one line that changes on a terminal, log lines elsewhere."""

    def __init__(self, *, log_interval: int, quiet: bool) -> None:
        self.quiet = quiet
        self.terminal = sys.stdout.isatty()
        self.log_interval = log_interval
        self.next_redraw = 0.0

    def show(self, text: str, episode: int) -> None:
        """Show the state after an episode, where it is due."""
        if self.quiet:
            return
        if not self.terminal:
            if episode % self.log_interval == 0:
                print(text, flush=True)
        elif time.monotonic() >= self.next_redraw:
            self.next_redraw = time.monotonic() + 0.1
            print(f"\r\x1b[K{text}", end="", flush=True)

    def end(self) -> None:
        """Clear the line that changes, so that what follows starts on a fresh one."""
        if self.terminal and not self.quiet:
            print("\r\x1b[K", end="", flush=True)


def train(args: argparse.Namespace) -> None:
    """Train until the task is solved or the episodes are used up, and tell the outcome; runs on rank 0."""
    agent = Agent(args.world_size, gamma=args.gamma, seed=args.seed)
    progress = Progress(log_interval=args.log_interval, quiet=args.quiet)
    curve: list[tuple[float, float]] = []
    episode = env_steps = 0
    solved = False
    start = time.perf_counter()
    while not solved and episode < args.max_episodes:
        episode += 1
        agent.run_episode()
        env_steps += sum(len(played.rewards) for played in agent.episodes.values())
        rewards = agent.finish_episode()
        reward = sum(rewards) / len(rewards)
        solved = agent.running_reward > agent.reward_threshold
        curve.append((reward, agent.running_reward))
        speed = env_steps / (time.perf_counter() - start)
        progress.show(
            f"episode {episode:4d}  reward {reward:5.1f}  "
            f"running {agent.running_reward:5.1f}/{agent.reward_threshold:.0f}  {speed:.0f} steps/s",
            episode,
        )
    seconds = time.perf_counter() - start
    progress.end()

    result = Result(
        args.backend, seconds, env_steps, env_steps / seconds, episode, solved, agent.running_reward
    )
    if args.plot:
        title = f"{ENVIRONMENT}, {args.world_size - 1} observer(s), seed {args.seed}, {args.backend}"
        draw(curve, agent.reward_threshold, title, args.plot)
    print(json.dumps(asdict(result)) if args.json else result, flush=True)


def draw(curve: Sequence[tuple[float, float]], threshold: float, title: str, file: str) -> None:
    """Write the learning curve as a PNG file."""
    # Imported late: only rank 0 draws, and only at the end. A Figure without pyplot needs no display.
    figure = import_module("matplotlib.figure").Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    rewards, running = zip(*curve, strict=True)
    numbers = range(1, len(curve) + 1)
    axes.plot(numbers, rewards, ".", color="0.65", markersize=4, label="reward of the episode")
    axes.plot(numbers, running, linewidth=2, label="running reward")
    axes.axhline(threshold, color="tab:green", linestyle="--", label=f"solved: above {threshold:.0f}")
    axes.set(title=title, xlabel="episode", ylabel="reward")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, format="png", dpi=120)


def run_worker(rank: int, args: argparse.Namespace) -> None:
    """Be one member of the group: the agent on rank 0, an observer on any other rank."""
    global rpc
    rpc = import_module(BACKENDS[args.backend])
    torch.set_num_threads(1)
    name = AGENT_NAME if rank == 0 else OBSERVER_NAME.format(rank)
    rpc.init_rpc(name, rank=rank, world_size=args.world_size)
    if rank == 0:
        train(args)
    # Waits until all members are here; until then the observers serve calls.
    rpc.shutdown()


def whole_number(smallest: int) -> Callable[[str], int]:
    """Return a converter for flags that are whole numbers, and not smaller than this."""

    def convert(text: str) -> int:
        value = int(text)
        if value < smallest:
            raise argparse.ArgumentTypeError(f"must be at least {smallest}, not {value}")
        return value

    convert.__name__ = "whole number"  # argparse puts it into its message about other text
    return convert


def fraction(text: str) -> float:
    """Convert a flag that lies between 0 and 1."""
    value = float(text)
    if not 0 <= value <= 1:  # false for a NaN, too
        raise argparse.ArgumentTypeError(f"must lie between 0 and 1, not {value}")
    return value


def output_file(text: str) -> str:
    """Check, before the training and not after it, that a file can be written."""
    path = Path(text).absolute()
    if text and not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"the directory {path.parent} does not exist")
    if text and path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a directory; give the name of a file")
    return text


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(
        description=f"Solve {ENVIRONMENT} with REINFORCE: one agent, and observers that play the games, in "
        "processes of their own that talk by nested RPCs.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--world_size", type=whole_number(2), default=2, help="processes: one agent, the rest observers")
    add("--log_interval", type=whole_number(1), default=10, help="episodes between log lines")
    add("--gamma", type=fraction, default=0.99, help="discount factor")
    add("--seed", type=whole_number(0), default=543, help="seed of the policy and of the environments")
    add("--backend", choices=sorted(BACKENDS), default="actorrpc", help="which RPC to run on")
    add("--max_episodes", type=whole_number(1), default=2000, help="give up after this many episodes")
    add(
        "--plot",
        type=output_file,
        default="reinforce_curve.png",
        metavar="FILE",
        help="where to write the learning curve (PNG); '' for nowhere",
    )
    add("--quiet", action="store_true", help="show no progress")
    add("--json", action="store_true", help="print the outcome as one line of JSON")
    args = parser.parse_args(argv)
    if args.plot and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib, or give --plot ''")
    return args


def free_port() -> int:
    """Return a TCP port that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
    return port


def main(argv: Sequence[str] | None = None) -> int:
    """Start all processes of the group and wait for them; return the exit status."""
    args = parse(argv)
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    try:
        spawn(run_worker, args=(args,), nprocs=args.world_size)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
