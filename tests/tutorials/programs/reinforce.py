"""Getting started with RPC: an agent learns CartPole from observers that call it for each action.

python reinforce.py --world-size 3 --episodes 2
"""

import argparse
import json
import os

import gymnasium as gym
import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim
from torch.distributed.rpc import RRef, remote, rpc_async, rpc_sync

AGENT_NAME = "agent"
OBSERVER_NAME = "observer{}"
SEED = 543
GAMMA = 0.99


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(4, 32)
        self.affine2 = nn.Linear(32, 2)

    def forward(self, x):
        return torch.softmax(self.affine2(torch.relu(self.affine1(x))), dim=1)


def _call_method(method, rref, *args, **kwargs):
    return method(rref.local_value(), *args, **kwargs)


def _remote_method(method, rref, *args, **kwargs):
    return rpc_sync(rref.owner(), _call_method, args=(method, rref, *args), kwargs=kwargs)


class Observer:
    def __init__(self):
        self.id = rpc.get_worker_info().id
        self.env = gym.make("CartPole-v1")
        self.episode = 0

    def run_episode(self, agent_rref, n_steps):
        state, _ = self.env.reset(seed=SEED + 100 * self.id + self.episode)
        self.episode += 1
        for step in range(n_steps):
            action = _remote_method(Agent.select_action, agent_rref, self.id, state)
            state, reward, terminated, _, _ = self.env.step(action)
            agent_rref.rpc_sync().report_reward(self.id, reward)
            if terminated:
                return step + 1
        return n_steps


class Agent:
    def __init__(self, world_size):
        torch.manual_seed(SEED)
        self.policy = Policy()
        self.optimizer = optim.Adam(self.policy.parameters(), lr=1e-2)
        self.agent_rref = RRef(self)
        self.ob_rrefs, self.rewards, self.saved_log_probs, self.dice = [], {}, {}, {}
        for ob_rank in range(1, world_size):
            ob_info = rpc.get_worker_info(OBSERVER_NAME.format(ob_rank))
            self.ob_rrefs.append(remote(ob_info, Observer))
            self.rewards[ob_info.id] = []
            self.saved_log_probs[ob_info.id] = []
            self.dice[ob_info.id] = torch.Generator().manual_seed(ob_info.id)

    def select_action(self, ob_id, state):
        probs = self.policy(torch.from_numpy(state).float().unsqueeze(0))
        action = torch.multinomial(probs, 1, generator=self.dice[ob_id])
        self.saved_log_probs[ob_id].append(probs.gather(1, action).log())
        return action.item()

    def report_reward(self, ob_id, reward):
        self.rewards[ob_id].append(reward)

    def run_episode(self, n_steps=0):
        futs = []
        for ob_rref in self.ob_rrefs:
            futs.append(
                rpc_async(
                    ob_rref.owner(),
                    _call_method,
                    args=(Observer.run_episode, ob_rref, self.agent_rref, n_steps),
                )
            )
        return [fut.wait() for fut in futs]

    def finish_episode(self):
        losses = []
        for ob_id in sorted(self.rewards):
            returns, total = [], 0.0
            for reward in reversed(self.rewards[ob_id]):
                total = reward + GAMMA * total
                returns.insert(0, total)
            returns = torch.tensor(returns)
            returns = (returns - returns.mean()) / (returns.std() + 1e-6)
            losses += [-p * r for p, r in zip(self.saved_log_probs[ob_id], returns, strict=True)]
            self.rewards[ob_id], self.saved_log_probs[ob_id] = [], []
        self.optimizer.zero_grad()
        loss = torch.cat(losses).sum()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def run_worker(rank, world_size, episodes):
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    if rank == 0:
        rpc.init_rpc(AGENT_NAME, rank=rank, world_size=world_size)
        agent = Agent(world_size)
        for i_episode in range(episodes):
            lengths = agent.run_episode(n_steps=40)
            print(json.dumps({"episode": i_episode, "steps": lengths, "loss": agent.finish_episode()}))
    else:
        rpc.init_rpc(OBSERVER_NAME.format(rank), rank=rank, world_size=world_size)
    rpc.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--world-size", type=int, default=3)
    parser.add_argument("--episodes", type=int, default=3)
    args = parser.parse_args()
    mp.spawn(run_worker, args=(args.world_size, args.episodes), nprocs=args.world_size, join=True)
