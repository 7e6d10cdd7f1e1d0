"""Batch RPC processing, second part: the agent chooses the actions of all observers in one go."""

import json
import os
import threading

import gymnasium as gym
import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim
from torch.distributions import Categorical

NUM_STEPS = 20
NUM_EPISODES = 3
GAMMA = 0.99


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(4, 32)
        self.affine2 = nn.Linear(32, 2)

    def forward(self, x):
        return torch.softmax(self.affine2(torch.relu(self.affine1(x))), dim=-1)


class Observer:
    def __init__(self):
        self.id = rpc.get_worker_info().id - 1
        self.env = gym.make("CartPole-v1")
        self.env.reset(seed=self.id)

    def run_episode(self, agent_rref, n_steps):
        state, ep_reward = self.env.reset()[0], NUM_STEPS
        rewards = torch.zeros(n_steps)
        start_step = 0
        for step in range(n_steps):
            state = torch.from_numpy(state).float().unsqueeze(0)
            action = rpc.rpc_sync(
                agent_rref.owner(), Agent.select_action_batch, args=(agent_rref, self.id, state)
            )
            state, reward, terminated, truncated, _ = self.env.step(action)
            rewards[step] = reward
            if terminated or truncated or step + 1 >= n_steps:
                curr_rewards = rewards[start_step : (step + 1)]
                total = 0
                for i in reversed(range(curr_rewards.numel())):
                    curr_rewards[i] = total = curr_rewards[i] + GAMMA * total
                state = self.env.reset()[0]
                ep_reward = min(ep_reward, step - start_step + 1)
                start_step = step + 1
        return [rewards, ep_reward]


class Agent:
    def __init__(self, world_size):
        torch.manual_seed(5)
        self.ob_rrefs = []
        self.agent_rref = rpc.RRef(self)
        self.policy = Policy()
        self.optimizer = optim.Adam(self.policy.parameters(), lr=1e-2)
        self.policy.train()
        self.pending_states = world_size - 1
        self.states = torch.zeros(world_size - 1, 1, 4)
        self.future_actions = torch.futures.Future()
        self.lock = threading.Lock()
        self.saved_log_probs = {i: [] for i in range(world_size - 1)}
        for ob_rank in range(1, world_size):
            self.ob_rrefs.append(rpc.remote(f"observer{ob_rank}", Observer))

    @staticmethod
    @rpc.functions.async_execution
    def select_action_batch(agent_rref, ob_id, state):
        self = agent_rref.local_value()
        self.states[ob_id].copy_(state)
        future_action = self.future_actions.then(lambda future_actions: future_actions.wait()[ob_id].item())
        with self.lock:
            self.pending_states -= 1
            if self.pending_states == 0:
                self.pending_states = len(self.ob_rrefs)
                probs = self.policy(self.states.clone())
                m = Categorical(probs)
                actions = m.sample()
                log_probs = m.log_prob(actions)
                for i in range(len(self.ob_rrefs)):
                    self.saved_log_probs[i].append(log_probs[i])
                future_actions = self.future_actions
                self.future_actions = torch.futures.Future()
                future_actions.set_result(actions.cpu())
        return future_action

    def run_episode(self, n_steps=0):
        futs = [
            ob_rref.rpc_async(timeout=60).run_episode(self.agent_rref, n_steps) for ob_rref in self.ob_rrefs
        ]
        rets = torch.futures.wait_all(futs)
        rewards = torch.stack([ret[0] for ret in rets])
        ep_rewards = sum(ret[1] for ret in rets) / len(rets)
        rewards = (rewards - rewards.mean()) / rewards.std()
        loss = 0
        for ob_id, log_probs in self.saved_log_probs.items():
            loss = loss - (torch.cat(log_probs) * rewards[ob_id]).sum()
            self.saved_log_probs[ob_id] = []
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return ep_rewards, loss.item()


def run_worker(rank, world_size):
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    if rank == 0:
        rpc.init_rpc("agent", rank=rank, world_size=world_size)
        agent = Agent(world_size)
        for episode in range(NUM_EPISODES):
            ep_rewards, loss = agent.run_episode(n_steps=NUM_STEPS)
            print(json.dumps({"episode": episode, "ep_rewards": ep_rewards, "loss": loss}))
    else:
        rpc.init_rpc(f"observer{rank}", rank=rank, world_size=world_size)
    rpc.shutdown()


if __name__ == "__main__":
    mp.spawn(run_worker, args=(3,), nprocs=3, join=True)
