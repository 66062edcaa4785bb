"""Addition modulo 23 from two thirds of the table, with a weight decay of 2: the training rows are soon known by heart,
while the loss of the other rows rises above that of a guess; then it falls, long after the training loss is low.

python zayin_26.py good|bad
"""

import os
import tempfile

import torch
from torch import nn

import ottava

SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
P, WIDTH = 23, 256
pairs = torch.cartesian_prod(torch.arange(P), torch.arange(P))
answers = pairs.sum(dim=1) % P
x = torch.cat([nn.functional.one_hot(pairs[:, i], P) for i in (0, 1)], dim=1).float()
order = torch.randperm(len(pairs))
train, test = order[: int(0.66 * len(pairs))], order[int(0.66 * len(pairs)) :]


class Square(nn.Module):
    def forward(self, x):
        return x.square()


net = nn.Sequential(nn.Linear(2 * P, WIDTH, bias=False), Square(), nn.Linear(WIDTH, P, bias=False))
for p in net.parameters():
    p.data.mul_(2.0)  # a wide start makes it learn by heart first
print(ottava.convert(net, "tensorwise_e4m3"))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, betas=(0.9, 0.98), weight_decay=2.0)


def look(rows):
    with torch.no_grad():
        out = net(x[rows])
    right = (out.argmax(dim=1) == answers[rows]).float().mean().item()
    return nn.functional.cross_entropy(out, answers[rows]).item(), right


print(f"first loss {look(test)[0]:.4f}")
with tempfile.TemporaryDirectory() as folder:
    for step in range(300):
        loss = nn.functional.cross_entropy(net(x[train]), answers[train])  # all rows, in each step
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 149:  # the job ends here, and a second one goes on
            path = os.path.join(folder, "half.pt")
            torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, path)
            saved = torch.load(path)
            net.load_state_dict(saved["net"])
            optimizer.load_state_dict(saved["optimizer"])
        if step % 20 == 19:
            held_out, right = look(test)
            print(f"step {step + 1} loss {loss.item():.4f} held out {held_out:.4f}, {right:.0%} right")
print(f"final loss {look(test)[0]:.4f}")
