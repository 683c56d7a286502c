"""Proximal policy optimisation on an environment of random numbers, with its rollout, its advantages and epochs of minibatches."""

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

STEPS, PLACES, SIGHT = 64, 8, 32
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(SIGHT, 256), nn.Tanh(), nn.Linear(256, 1))
        self.actor = nn.Sequential(nn.Linear(SIGHT, 256), nn.Tanh(), nn.Linear(256, 4))

    def forward(self, sight, action=None):
        choices = Categorical(logits=self.actor(sight))
        action = choices.sample() if action is None else action
        return action, choices.log_prob(action), choices.entropy(), self.critic(sight).flatten()


agent = Agent().to(device)
optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
sights = torch.zeros(STEPS, PLACES, SIGHT, device=device)
actions, chances, rewards, values = (torch.zeros(STEPS, PLACES, device=device) for _ in range(4))
draws = np.random.default_rng(0)
for _ in range(2):
    for step in range(STEPS):
        sights[step] = torch.Tensor(draws.normal(size=(PLACES, SIGHT))).to(device)
        with torch.no_grad():
            action, chances[step], _, values[step] = agent(sights[step])
        actions[step] = action
        rewards[step] = torch.tensor(draws.normal(size=PLACES) + action.cpu().numpy()).to(device)
    with torch.no_grad():
        advantages, last = torch.zeros_like(rewards), 0
        for step in reversed(range(STEPS - 1)):
            change = rewards[step] + 0.99 * values[step + 1] - values[step]
            advantages[step] = last = change + 0.99 * 0.95 * last
        returns = advantages + values
    rows = [one.reshape(-1, *one.shape[2:]) for one in (sights, actions, chances, advantages, returns)]
    order, far = np.arange(STEPS * PLACES), []
    for _ in range(2):
        draws.shuffle(order)
        for start in range(0, len(order), 128):
            sight, action, before, advantage, wanted = (one[order[start : start + 128]] for one in rows)
            _, chance, entropy, value = agent(sight, action.long())
            ratio = (chance - before).exp()
            far.append(((ratio - 1).abs() > 0.2).float().mean().item())
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            policy = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
            loss = policy + 0.5 * (value - wanted).pow(2).mean() - 0.01 * entropy.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
    print(np.mean(far))
