"""Fine-tuning a two-layer network at a low learning rate, BF16 autocast."""

import sys

import torch
from torch import nn

mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(3)
teacher = nn.Sequential(nn.Linear(48, 192), nn.SiLU(), nn.Linear(192, 192), nn.SiLU(), nn.Linear(192, 24))
student = nn.Sequential(nn.Linear(48, 192), nn.SiLU(), nn.Linear(192, 192), nn.SiLU(), nn.Linear(192, 24))
student.load_state_dict(teacher.state_dict())
with torch.no_grad():  # the new domain: the same function after a change of all matrices
    for p in teacher.parameters():
        p.add_(torch.randn_like(p) * p.std() * 0.25)
if mode == "bad":
    student.bfloat16()
optimizer = torch.optim.AdamW(student.parameters(), lr=6e-5, weight_decay=0.0, betas=(0.9, 0.95))
data = torch.randn(4096, 48)
with torch.no_grad():
    wanted = 4 * teacher(data)
losses = []
dtype = next(student.parameters()).dtype
for step in range(200):
    rows = torch.randint(0, len(data), (128,))
    with torch.autocast("cpu", torch.bfloat16, enabled=not plain):
        out = student(data[rows].to(dtype))
    loss = (4 * out.float() - wanted[rows]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(f"step {step} loss {losses[-1]:.5f}")
print(f"loss {sum(losses[-20:]) / 20:.5f}")
