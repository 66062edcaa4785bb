"""Values learned by bootstrapping; the target network is replaced every 25 steps."""
import copy
import sys

import torch
from torch import nn

PLAIN = "plain" in sys.argv[2:]


def fp8(t):
    if PLAIN:
        return t
    scale = 448.0 / t.detach().abs().amax(-1, keepdim=True).clamp(min=1e-12)
    return t + ((t.detach() * scale).to(torch.float8_e4m3fn).float() / scale - t.detach())


class Linear(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(fp8(x), fp8(self.weight), self.bias)


torch.manual_seed(60)
width = 96
online = nn.Sequential(nn.Linear(32, width), nn.ReLU(), Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
target = copy.deepcopy(online).requires_grad_(False)
optimizer = torch.optim.Adam(online.parameters(), lr=1e-3)
reward, turn = torch.randn(32) / 4, torch.linalg.qr(torch.randn(32, 32))[0]
losses = []
for step in range(200):
    if step % 25 == 0:
        target.load_state_dict(online.state_dict())
    s = torch.randn(256, 32)
    aim = torch.tanh(s @ reward)[:, None] * 2 + 0.8 * target(s @ turn)
    loss = nn.functional.smooth_l1_loss(online(s), aim)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"first {losses[0]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")
