"""Reinforcement learning of a language model: generators sample, a judge scores, a trainer learns, all at the same time.

    python examples/post_training.py
    python examples/post_training.py --steps 100 --lose 0    # shorter, and no generator is killed

The model is a small transformer over characters. Pretraining teaches it the form of the task: "hdmbeca>" followed by these
letters in any order. Then it learns, from rewards alone, to sort the letters. For each prompt, a generator samples a group of
answers; the judge's reward is the fraction of letters that are in the right place; the trainer increases the probability of
answers that are better than the mean of their group (group-relative policy optimization, GRPO, with PPO's clipped ratio).

Texts and rewards go from actor to actor, as references. Weights are sent by a collective: the trainer broadcasts, and each
generator receives them on a separate thread while it samples. With ``--lose N``, a generator is killed at step N; supervision
restarts it, the collective is rebuilt, and the next broadcast gives the new process the weights.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from tqdm import tqdm

import actorrpc

LETTERS, LENGTH = 16, 7  # a prompt has LENGTH different letters of the first LETTERS
END = LETTERS  # ">", the end of a prompt


def make_prompts(count: int, dice: torch.Generator) -> Tensor:
    """Return prompts: unsorted letters, followed by the end sign."""
    letters = torch.rand(count, LETTERS, generator=dice).argsort(1)[:, :LENGTH]
    return torch.cat([letters, torch.full((count, 1), END)], 1)


def spell(tokens: Tensor) -> str:
    """Return tokens as text."""
    return "".join("abcdefghijklmnop>"[token] for token in tokens.tolist())


class Policy(nn.Module):
    """A transformer that predicts the next letter."""

    def __init__(self, width: int = 48, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(LETTERS + 1, width)
        self.places = nn.Parameter(0.02 * torch.randn(2 * LENGTH, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, LETTERS)

    def forward(self, text: Tensor) -> Tensor:
        """Return the scores of the next letter at each position of the texts."""
        size = text.shape[1]
        mask = torch.ones(size, size, dtype=torch.bool).triu(1)  # nothing looks ahead
        return self.head(self.body(self.tokens(text) + self.places[:size], mask=mask))

    def of_answers(self, text: Tensor) -> Tensor:
        """Return the log-probabilities of the letters of the answers, which follow the prompts."""
        scores = self(text[:, :-1])[:, LENGTH:]
        return scores.log_softmax(2).gather(2, text[:, LENGTH + 1 :, None]).squeeze(2)


def pretrain(policy: Policy, steps: int, seed: int) -> None:
    """Teach the form: all letters of the prompt, in any order."""
    dice = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    for _ in tqdm(range(steps), "pretraining", disable=None, leave=False):
        prompts = make_prompts(64, dice)
        order = torch.rand(64, LENGTH, generator=dice).argsort(1)
        text = torch.cat([prompts, prompts.gather(1, order)], 1)
        loss = cross_entropy(policy(text[:, :-1])[:, LENGTH:].flatten(0, 1), text[:, LENGTH + 1 :].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class Member:
    """The base class of trainer and generators: a policy and a membership in the collective."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.latest = parameters_to_vector(policy.parameters()).detach()

    @actorrpc.method(concurrency_group="weights")
    def share(self) -> None:
        """Take part in a broadcast of the trainer's weights; sampling continues with the old weights meanwhile."""
        weights = self.latest.clone()
        dist.broadcast(weights, group=actorrpc.collective_group(), group_src=0)
        self.latest = weights


@actorrpc.remote(max_restarts=-1, concurrency_groups={"weights": 1})
class Generator(Member):
    """Samples answers."""

    @torch.inference_mode()
    def sample(self, count: int, group: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return texts, ``group`` answers to each of ``count`` prompts one after the other, and their log-probabilities."""
        dice = torch.Generator().manual_seed(seed)
        vector_to_parameters(self.latest, self.policy.parameters())
        text = make_prompts(count, dice).repeat_interleave(group, 0)
        for _ in range(LENGTH):
            chances = self.policy(text)[:, -1].softmax(1)
            text = torch.cat([text, chances.multinomial(1, generator=dice)], 1)
        return text, self.policy.of_answers(text)


@actorrpc.remote
class Judge:
    """Computes rewards."""

    def score(self, sampled: tuple[Tensor, Tensor]) -> Tensor:
        """Return the fraction of letters in the right place, for each text."""
        text, _ = sampled
        return (text[:, LENGTH + 1 :] == text[:, :LENGTH].sort(1).values).float().mean(1)


@actorrpc.remote(concurrency_groups={"weights": 1})
class Trainer(Member):
    """Learns."""

    def __init__(self, policy: Policy, rate: float, clip: float = 0.2) -> None:
        super().__init__(policy)
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=rate)
        self.clip = clip

    def learn(self, sampled: tuple[Tensor, Tensor], rewards: Tensor, group: int) -> tuple[float, str]:
        """Make a step with the groups of a generator; return their mean reward, and one of the texts."""
        text, before = sampled
        groups = rewards.view(-1, group)
        better = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 0.1)
        # The generator may have sampled with weights of some steps ago.
        ratio = (self.policy.of_answers(text) - before).exp()
        advantage = better.view(-1, 1)
        kept = ratio.clamp(1 - self.clip, 1 + self.clip)
        loss = -torch.minimum(ratio * advantage, kept * advantage).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.latest = parameters_to_vector(self.policy.parameters()).detach()
        return rewards.mean().item(), spell(text[0])


def share(collective: actorrpc.Collective) -> bool:
    """Send the trainer's weights to all members. Waits for a lost member to restart; returns whether a member was lost."""
    generation = collective.generation
    for attempt in range(5):
        try:
            actorrpc.get(collective.call("share"))
            break
        except (actorrpc.CollectiveError, actorrpc.ActorUnavailableError):
            if attempt == 4:
                raise
    return collective.generation > generation


def train(args: argparse.Namespace, rewards: list[float], lost: list[int]) -> None:
    """Sample and learn; add the reward of each step to ``rewards``, and the steps at which a generator was lost to ``lost``."""
    torch.set_num_threads(1)  # as in the actors: there are more processes than processors
    torch.manual_seed(args.seed)
    policy = Policy()
    pretrain(policy, args.pretrain, args.seed)
    trainer = Trainer.remote(policy, args.rate)
    generators = [Generator.remote(policy) for _ in range(args.generators)]
    judge = Judge.remote()
    collective = actorrpc.collective([trainer, *generators])
    dies = args.lose
    seeds = itertools.count(1_000_000 * args.seed)  # one for each batch of answers
    sampling: dict[Any, Any] = {
        each.sample.remote(args.prompts, args.group, next(seeds)): each for each in generators
    }
    with tqdm(total=args.steps, desc="post-training", disable=None) as progress:
        while len(rewards) < args.steps:
            if len(rewards) + 1 == dies:
                actorrpc.kill(generators[-1], no_restart=False)
                dies = 0
            (sampled, *_), _ = actorrpc.wait(list(sampling), fetch_local=False)
            generator = sampling.pop(sampled)
            try:
                scores = judge.score.remote(sampled)
                reward, text = actorrpc.get(trainer.learn.remote(sampled, scores, args.group))
            except actorrpc.ActorUnavailableError:
                pass  # what it sampled is lost with it
            else:
                rewards.append(reward)
                progress.update()
                progress.set_postfix(reward=f"{reward:.2f}", text=text)
                if len(rewards) % 10 == 0:
                    tqdm.write(f"step {len(rewards)}  reward {sum(rewards[-10:]) / 10:.3f}  {text}")
            if share(collective):
                lost.append(len(rewards))
                tqdm.write(f"step {lost[-1]}: a generator was lost; all {len(generators)} are back")
            sampling[generator.sample.remote(args.prompts, args.group, next(seeds))] = generator
    collective.destroy()


def draw(rewards: list[float], lost: list[int], file: str) -> None:
    """Write the curve as a PNG."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(rewards) + 1), rewards, linewidth=1.2, label="mean reward of the step")
    for step in lost:
        axes.axvline(step, color="tab:red", linestyle="--", label="a generator is lost")
    axes.set(xlabel="step", ylabel="letters in the right place", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(file, format="png", dpi=120)
    print(f"reward curve: {file}")


def main() -> int:
    """Train until the steps are used up, or Ctrl-C; tell the outcome."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default, what in (
        ("generators", 2, "how many sample"),
        ("steps", 300, "of the trainer"),
        ("prompts", 16, "in a step"),
        ("group", 16, "answers to each prompt"),
        ("pretrain", 300, "steps before, on the form alone"),
        ("lose", 60, "a generator is killed at this step; 0: none"),
        ("seed", 0, "of weights and texts"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default {default})")
    parser.add_argument("--rate", type=float, default=1e-3, help="of learning (default 0.001)")
    parser.add_argument("--plot", default="post_training.png", help="the reward curve ('' for none)")
    args = parser.parse_args()
    if min(args.generators, args.steps, args.prompts, args.pretrain) < 1 or args.group < 2:
        parser.error("--generators, --steps, --prompts and --pretrain must be at least 1, --group at least 2")
    rewards: list[float] = []
    lost: list[int] = []
    interrupted, begin = False, time.perf_counter()
    try:
        with actorrpc.init():
            train(args, rewards, lost)
    except KeyboardInterrupt:
        interrupted = True
    last = rewards[-20:] or [0.0]
    print(
        f"{'interrupted' if interrupted else 'done'} after {len(rewards)} steps, {len(lost)} generators lost, in "
        f"{time.perf_counter() - begin:.1f} s: reward {rewards[0] if rewards else 0:.3f} -> {sum(last) / len(last):.3f}"
    )
    if args.plot and rewards:
        draw(rewards, lost, args.plot)
    return 130 if interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
