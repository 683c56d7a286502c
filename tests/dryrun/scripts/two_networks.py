"""A generator and what tells its digits from real ones, each with an optimizer, by the classes of tensors of older scripts."""

import numpy as np
import torch
from torch import nn

on_gpu = torch.cuda.is_available()
Tensor = torch.cuda.FloatTensor if on_gpu else torch.FloatTensor
generator = nn.Sequential(
    nn.Linear(100, 256), nn.BatchNorm1d(256), nn.LeakyReLU(0.2, inplace=True), nn.Linear(256, 784), nn.Tanh()
)
critic = nn.Sequential(nn.Linear(784, 512), nn.LeakyReLU(0.2, inplace=True), nn.Linear(512, 1), nn.Sigmoid())
loss = nn.BCELoss()
if on_gpu:
    generator.cuda()
    critic.cuda()
    loss.cuda()
of_generator = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
of_critic = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
for _ in range(4):
    real = torch.zeros(64, 784).type(Tensor)
    valid, fake = Tensor(64, 1).fill_(1.0), Tensor(64, 1).fill_(0.0)
    of_generator.zero_grad()
    made = generator(Tensor(np.random.normal(0, 1, (64, 100))))
    generator_loss = loss(critic(made), valid)
    generator_loss.backward()
    of_generator.step()
    of_critic.zero_grad()
    critic_loss = (loss(critic(real), valid) + loss(critic(made.detach()), fake)) / 2
    critic_loss.backward()
    of_critic.step()
    print(f"{generator_loss.item():.4f} {critic_loss.item():.4f}")
