"""Reinforcement learning without waiting: samplers play with weights of some steps ago, and the learner corrects for that.

    python examples/impala.py --samplers 2

Samplers play CartPole, several games at a time, and send their experience after every ``--length`` steps. The learner
takes the batches that are ready. Samplers and learner do not wait for each other, so a game was played with older weights
than those that learn from it. V-trace corrects for this: it weights actions by how much more likely they are under the
present policy, up to a bound.
(Espeholt et al., "IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner Architectures", 2018.)

Experience and weights go from actor to actor, as references. The driver only receives rewards and which calls have ended.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from typing import Any, NamedTuple

import gymnasium
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm

import actorrpc

GAME = "CartPole-v1"
GAMMA = 0.99


class Experience(NamedTuple):
    """The steps of several games: tensors with the dimensions time and game.

    Attributes:
        states: one more than there are steps.
        logits: of the policy that chose the actions.
        discounts: GAMMA, or 0 where a game ended.
        version: of the weights.
        finished: the rewards of the games that ended.
    """

    states: Tensor
    actions: Tensor
    logits: Tensor
    rewards: Tensor
    discounts: Tensor
    version: int
    finished: list[float]


Weights = tuple[dict[str, Tensor], int]  # and in how many steps they were learned


class Net(nn.Module):
    """A policy, and how much reward it expects."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.value = (
            nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))
            for outputs in (2, 1)
        )

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores of the actions, and values."""
        return self.policy(states), self.value(states).squeeze(-1)


def vtrace(
    ratios: Tensor, rewards: Tensor, discounts: Tensor, values: Tensor, bound: float = 1.0, trace: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the targets of the values, and the advantage of each action.

    Args:
        ratios: probability of the action now, divided by that when it was chosen.
        values: as the learner has them, one more than there are steps.
        bound: the upper limit of a ratio as the weight of a step (the paper's rho).
        trace: the upper limit of a ratio as the weight of the steps after a step (the paper's c).
    """
    weights, traces = ratios.clamp(max=bound), ratios.clamp(max=trace)
    surprises = weights * (rewards + discounts * values[1:] - values[:-1])
    correction = torch.zeros_like(values[0])
    corrections = []
    for step in reversed(range(len(rewards))):
        correction = surprises[step] + discounts[step] * traces[step] * correction
        corrections.append(correction)
    targets = values[:-1] + torch.stack(corrections).flip(0)
    following = torch.cat([targets[1:], values[-1:]])
    return targets, weights * (rewards + discounts * following - values[:-1])


@actorrpc.remote
class Sampler:
    """Plays several games at a time."""

    def __init__(self, games: int, length: int, seed: int) -> None:
        self.length = length
        self.net = Net()
        self.dice = torch.Generator().manual_seed(seed)
        self.games = [gymnasium.make(GAME) for _ in range(games)]
        first = [game.reset(seed=1000 * seed + index)[0] for index, game in enumerate(self.games)]
        self.states = torch.tensor([state.tolist() for state in first])
        self.scores = [0.0] * games

    @torch.inference_mode()
    def play(self, learned: Weights) -> Experience:
        """Play some steps of each game, with these weights."""
        weights, version = learned
        self.net.load_state_dict(weights)
        states, others = [self.states], []
        finished: list[float] = []
        for _ in range(self.length):
            scores = self.net.policy(self.states)
            chosen = scores.softmax(1).multinomial(1, generator=self.dice).squeeze(1)
            steps = [self.step(index, action, finished) for index, action in enumerate(chosen.tolist())]
            following, earned, discount = zip(*steps, strict=True)
            self.states = torch.tensor(following)
            states.append(self.states)
            others.append((chosen, scores, torch.tensor(earned), torch.tensor(discount)))
        parts = [torch.stack(each) for each in (states, *zip(*others, strict=True))]
        return Experience(*parts, version, finished)

    def step(self, index: int, action: int, finished: list[float]) -> tuple[list[float], float, float]:
        """Do one step of one game; return the next state, the reward, and the discount of later rewards."""
        state, reward, fallen, time_is_up, _ = self.games[index].step(action)
        earned = float(reward)
        self.scores[index] += earned
        if not (fallen or time_is_up):
            return state.tolist(), earned, GAMMA
        if not fallen:  # the step limit ended the game: add the estimated value of the rest
            earned += GAMMA * self.net.value(torch.tensor(state)).item()
        finished.append(self.scores[index])
        self.scores[index] = 0.0
        return self.games[index].reset()[0].tolist(), earned, 0.0


@actorrpc.remote
class Learner:
    """Learns from the experience of samplers, in the order in which it arrives."""

    def __init__(self, rate: float, seed: int) -> None:
        torch.manual_seed(seed)
        self.net = Net()
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=rate)
        self.version = 0

    def weights(self) -> Weights:
        """Return the parameters."""
        return {name: each.clone() for name, each in self.net.state_dict().items()}, self.version

    @actorrpc.method(num_returns=2)
    def learn(self, played: Experience) -> tuple[dict[str, Any], Weights]:
        """Do a training step; return statistics and the new weights."""
        logits, values = self.net(played.states)
        now = logits[:-1].log_softmax(2)
        chosen = now.gather(2, played.actions.unsqueeze(2)).squeeze(2)
        before = played.logits.log_softmax(2).gather(2, played.actions.unsqueeze(2)).squeeze(2)
        ratios = (chosen - before).exp().detach()
        targets, advantages = vtrace(ratios, played.rewards, played.discounts, values.detach())
        size = advantages.std() + 1e-3
        entropy = -(now.exp() * now).sum(2).mean()
        wrong = (targets - values[:-1]).square().mean()
        loss = (
            -(chosen * advantages / size).mean() + 0.5 * wrong / (1 + wrong.detach().sqrt()) - 0.01 * entropy
        )
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()
        age, steps = self.version - played.version, played.actions.numel()
        self.version += 1
        return {"finished": played.finished, "steps": steps, "age": age}, self.weights()


def train(args: argparse.Namespace, curve: list[tuple[int, float]]) -> dict[str, float]:
    """Play and learn until the game is solved or the steps are used up; add the points to ``curve``."""
    threshold = float(gymnasium.spec(GAME).reward_threshold or 475)
    learner = Learner.remote(args.rate, args.seed)
    samplers = [Sampler.remote(args.games, args.length, args.seed + index) for index in range(args.samplers)]
    newest = learner.weights.remote()
    playing: dict[Any, Any] = {each.play.remote(newest): each for each in samplers}
    learning: dict[Any, Any] = {}  # pending training steps -> the weights that they will return
    latest: deque[float] = deque(maxlen=50)
    steps = ages = updates = 0
    with tqdm(total=args.max_steps, desc=GAME, unit="step", disable=None) as progress:
        while steps < args.max_steps and (len(latest) < 50 or sum(latest) / 50 < threshold):
            # If the learner is behind, wait only for the learner; otherwise for the first ready call.
            behind = len(learning) > args.samplers
            (ready, *_), _ = actorrpc.wait([*learning, *([] if behind else playing)], fetch_local=False)
            if ready in playing:
                sampler = playing.pop(ready)
                told, weights = learner.learn.remote(ready)
                learning[told] = weights
                playing[sampler.play.remote(newest)] = sampler  # the weights of the last finished step
                continue
            newest = learning.pop(ready)
            told = actorrpc.get(ready)
            steps += told["steps"]
            ages += told["age"]
            updates += 1
            latest.extend(told["finished"])
            progress.update(told["steps"])
            if latest:
                curve.append((steps, sum(latest) / len(latest)))
                progress.set_postfix(reward=f"{curve[-1][1]:.0f}", age=told["age"], refresh=False)
                if updates % 20 == 0:
                    tqdm.write(
                        f"steps {steps:6d}  reward {curve[-1][1]:5.1f}  age of weights {ages / updates:.1f}"
                    )
    return {"age": ages / max(1, updates), "solved": bool(curve) and curve[-1][1] >= threshold}


def draw(curve: list[tuple[int, float]], file: str) -> None:
    """Write the learning curve as a PNG."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*curve, strict=True), linewidth=1.5)
    axes.set(
        title=GAME, xlabel="steps of all games", ylabel="mean reward of the last 50 games", ylim=(0, 510)
    )
    axes.grid(alpha=0.3)
    figure.savefig(file, format="png", dpi=120)
    print(f"learning curve: {file}")


def main() -> int:
    """Train until it is solved, the steps are used up, or Ctrl-C; tell the outcome."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default, what in (
        ("samplers", 2, "actors that play"),
        ("games", 8, "that each plays at a time"),
        ("length", 32, "steps that the learner gets at a time"),
        ("max-steps", 400_000, "give up after so many"),
        ("seed", 0, "of weights, actions and games"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default {default})")
    parser.add_argument("--rate", type=float, default=2e-3, help="of learning (default 0.002)")
    parser.add_argument("--plot", default="impala.png", help="the learning curve ('' for none)")
    args = parser.parse_args()
    if min(args.samplers, args.games, args.length, args.max_steps) < 1:
        parser.error("--samplers, --games, --length and --max-steps must be at least 1")
    curve: list[tuple[int, float]] = []
    told: dict[str, float] = {}
    begin = time.perf_counter()
    try:
        with actorrpc.init():
            told = train(args, curve)
    except KeyboardInterrupt:
        pass
    seconds = time.perf_counter() - begin
    steps, reward = curve[-1] if curve else (0, 0.0)
    outcome = "interrupted" if not told else "solved" if told["solved"] else "not solved"
    print(f"{outcome} after {steps} steps in {seconds:.1f} s: reward {reward:.1f}", end="")
    print(f", weights {told['age']:.1f} updates old" if told else "")
    if args.plot and curve:
        draw(curve, args.plot)
    return 0 if told else 130


if __name__ == "__main__":
    sys.exit(main())
