"""Reinforcement learning with actors: an agent learns to balance a pole, observers play the games.

    python examples/cartpole.py --observers 2

Every actor is a process of its own. The driver asks the agent for a round; the agent asks all observers to
play one episode each; and for every step of a game an observer calls *back* to the agent, which waits for it.
Both are plain actors that do one thing at a time: calls that descend from the one an actor waits for may run
meanwhile, so this ring of calls is no deadlock. The learning is REINFORCE, and a seed gives the same curve again.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from itertools import chain
from typing import Any

import gymnasium
import torch

import actorrpc

GAME = "CartPole-v1"


@actorrpc.remote
class Observer:
    """Owns one environment, and plays episodes in it as the agent says."""

    def __init__(self, index: int, seed: int) -> None:
        self.index = index
        self.env = gymnasium.make(GAME)
        self.env.reset(seed=1000 * seed + index)  # only the first: each later game starts somewhere else

    def run_episode(self, agent: Any) -> None:
        """Play one episode, with two calls to the agent for each step."""
        state, _ = self.env.reset()
        done = False
        while not done:
            action = actorrpc.get(agent.select_action.remote(self.index, state.tolist()))
            state, reward, terminated, truncated, _ = self.env.step(action)
            done = terminated or truncated
            # Not waited for: calls to an actor run in the order in which they were made. Only the last matters.
            reported = agent.report_reward.remote(self.index, float(reward))
        actorrpc.get(reported)


@actorrpc.remote
class Agent:
    """Holds the policy, lets the observers play, and learns from what they report."""

    def __init__(self, observers: int, seed: int, gamma: float = 0.99) -> None:
        torch.manual_seed(seed)
        self.policy = torch.nn.Sequential(torch.nn.Linear(4, 128), torch.nn.ReLU(), torch.nn.Linear(128, 2))
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=1e-2)
        self.gamma = gamma
        self.baseline = torch.zeros(
            500
        )  # the usual return at each time step: a higher return means good actions
        self.spread: float | None = None
        # Each observer has its own random numbers, so that its games do not depend on the games of others.
        self.dice = [random.Random(f"{seed}/{index}") for index in range(observers)]
        self.observers = [Observer.remote(index, seed) for index in range(observers)]
        self.begin_round()

    def begin_round(self) -> None:
        """Discard the steps of the last round."""
        self.states: list[list[list[float]]] = [[] for _ in self.observers]
        self.actions: list[list[int]] = [[] for _ in self.observers]
        self.rewards: list[list[float]] = [[] for _ in self.observers]

    def select_action(self, observer: int, state: list[float]) -> int:
        """Draw an action from the policy; observers call this."""
        with torch.inference_mode():
            chance = self.policy(torch.tensor(state)).softmax(0)[0].item()
        action = 0 if self.dice[observer].random() < chance else 1
        self.states[observer].append(state)
        self.actions[observer].append(action)
        return action

    def report_reward(self, observer: int, reward: float) -> None:
        """Take the reward of an observer's latest action; observers call this."""
        self.rewards[observer].append(reward)

    def play_round(self) -> list[float]:
        """Have every observer play an episode, all at the same time; learn from it, return their rewards."""
        me = actorrpc.current_actor()
        actorrpc.get([observer.run_episode.remote(me) for observer in self.observers])
        scores = [sum(rewards) for rewards in self.rewards]
        self.learn()
        self.begin_round()
        return scores

    def learn(self) -> None:
        """Make actions likelier that were followed by more reward than usual, and the others rarer."""
        returns = [self.returns(rewards) for rewards in self.rewards]
        advantages = torch.cat([each - self.baseline[: len(each)] for each in returns])
        # Scaled by their usual size plus a constant: when all games go well, small differences are only noise.
        size = advantages.square().mean().item()
        self.spread = size if self.spread is None else 0.9 * self.spread + 0.1 * size
        advantages /= self.spread**0.5 + 3.0
        for each in returns:
            self.baseline *= 0.8
            self.baseline[: len(each)] += 0.2 * each

        states = torch.tensor(list(chain(*self.states)))
        actions = torch.tensor(list(chain(*self.actions)))
        chosen = self.policy(states).log_softmax(1).gather(1, actions.unsqueeze(1)).squeeze(1)
        self.optimizer.zero_grad()
        (-(chosen * advantages).mean()).backward()
        self.optimizer.step()

    def returns(self, rewards: list[float]) -> torch.Tensor:
        """Return the discounted sum of the rewards to come, for each step of an episode."""
        sums, total = [], 0.0
        for reward in reversed(rewards):
            total = reward + self.gamma * total
            sums.append(total)
        return torch.tensor(sums[::-1])


def show(episode: int, most: int, reward: float, running: float, threshold: float, rate: float) -> None:
    """Show the progress: one line that is updated on a terminal, a line from time to time elsewhere."""
    bar = "#" * min(30, int(30 * running / threshold))
    text = (
        f"[{bar:<30}] episode {episode:3d}/{most}  reward {reward:5.1f}  "
        f"running {running:5.1f}/{threshold:.0f}  {rate:.0f} steps/s"
    )
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    elif episode % 10 == 0:
        print(text, file=sys.stderr, flush=True)


def draw(curve: list[tuple[float, float]], threshold: float, file: str) -> None:
    """Write the learning curve as a PNG, where matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no learning curve: pip install matplotlib", file=sys.stderr)
        return
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    rewards, running = zip(*curve, strict=True)
    episodes = range(1, len(curve) + 1)
    axes.plot(episodes, rewards, ".", color="0.65", label="mean reward of the episode")
    axes.plot(episodes, running, linewidth=2, label="running reward")
    axes.axhline(threshold, color="tab:green", linestyle="--", label=f"solved: above {threshold:.0f}")
    axes.set(title=GAME, xlabel="episode", ylabel="reward", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, format="png", dpi=120)
    print(f"learning curve: {file}")


def main() -> int:
    """Train until the game is solved, the episodes are used up, or Ctrl-C; tell the outcome."""
    parser = argparse.ArgumentParser(description=f"Solve {GAME} with one agent and observers that play.")
    parser.add_argument("--observers", type=int, default=2, help="how many play (default 2)")
    parser.add_argument("--max-episodes", type=int, default=500, help="give up after so many (default 500)")
    parser.add_argument("--seed", type=int, default=3, help="of policy, actions and games (default 3)")
    parser.add_argument("--plot", default="cartpole.png", help="the learning curve ('' for none)")
    args = parser.parse_args()
    if min(args.observers, args.max_episodes) < 1:
        parser.error("--observers and --max-episodes must be at least 1")

    threshold = float(gymnasium.spec(GAME).reward_threshold or 475)
    curve: list[tuple[float, float]] = []
    running, steps, interrupted, start = 0.0, 0, False, time.perf_counter()
    try:
        with actorrpc.init():
            agent = Agent.remote(args.observers, args.seed)
            actorrpc.get(agent.begin_round.remote())
            start = time.perf_counter()
            while running <= threshold and len(curve) < args.max_episodes:
                rewards = actorrpc.get(agent.play_round.remote())
                reward = sum(rewards) / len(rewards)
                running += 0.05 * (reward - running)
                steps += int(sum(rewards))  # one point for each step
                curve.append((reward, running))
                rate = steps / (time.perf_counter() - start)
                show(len(curve), args.max_episodes, reward, running, threshold, rate)
    except KeyboardInterrupt:
        interrupted = True
    seconds = time.perf_counter() - start
    if sys.stderr.isatty():
        print(file=sys.stderr)

    outcome = "interrupted" if interrupted else "solved" if running > threshold else "not solved"
    print(
        f"{outcome} after {len(curve)} episodes: running reward {running:.1f}; "
        f"{steps} steps in {seconds:.1f} s, {steps / seconds:.0f} steps/s"
    )
    if args.plot and curve:
        draw(curve, threshold, args.plot)
    return 130 if interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
