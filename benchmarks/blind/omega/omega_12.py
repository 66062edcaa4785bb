"""Q-learning on a ring of rooms with a target network that follows slowly; casts by hand."""

import copy
import os
import sys

import torch
from torch import nn
from torch.nn import functional as F

bad = sys.argv[1] == "bad"
plain = "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", 0)))
torch.set_num_threads(1)

STEPS, BATCH, ROOMS, GAMMA, TAU = 200, 128, 24, 0.9, 0.05


def cast(x):
    scale = 448.0 / x.detach().abs().amax(dim=-1, keepdim=True).clamp(min=1e-12)
    return (x.detach() * scale).to(torch.float8_e4m3fn).float() / scale


class Linear8(nn.Linear):
    def forward(self, x):
        if plain:
            return super().forward(x)
        x8 = x + (cast(x) - x).detach()
        w8 = self.weight + (cast(self.weight) - self.weight).detach()
        return F.linear(x8, w8, self.bias)


def network():
    return nn.Sequential(Linear8(ROOMS, 64), nn.ReLU(), Linear8(64, 64), nn.ReLU(), nn.Linear(64, 2))


def optimum():
    q = torch.zeros(ROOMS, 2)
    for _ in range(400):
        v = q.max(1).values
        for s in range(ROOMS):
            for a, move in enumerate((-1, 1)):
                n = (s + move) % ROOMS
                q[s, a] = (1.0 if n == 0 else 0.0) + GAMMA * v[n]
    return q


online = network()
target = copy.deepcopy(online).requires_grad_(False)
optimizer = torch.optim.Adam(online.parameters(), lr=2e-3)
truth = optimum()
eye = torch.eye(ROOMS)
errors = []
for step in range(STEPS):
    for _ in range(4):
        s = torch.randint(0, ROOMS, (BATCH,))
        a = torch.randint(0, 2, (BATCH,))
        n = (s + 2 * a - 1) % ROOMS
        reward = (n == 0).float()
        with torch.no_grad():
            goal = reward + GAMMA * target(eye[n]).max(1).values
        q = online(eye[s]).gather(1, a[:, None])[:, 0]
        loss = F.smooth_l1_loss(q, goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), online.parameters()):
                slow.lerp_(fast, TAU)
                if bad and not plain and slow.dim() > 1:
                    slow.copy_(cast(slow))
    with torch.no_grad():
        errors.append(F.mse_loss(online(eye), truth).item())
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.5f} error of Q {errors[-1]:.4f}")
print(f"final loss {sum(errors[-10:]) / 10:.4f}")
