"""Progressive stacking under accelerate: one block, then two, then four; each stage begins with copies and a new optimizer."""
import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ottava.doors.accelerate import prepare

SEED = int(os.environ.get("SEED", "0"))
set_seed(SEED)
VOCAB, LENGTH, WIDTH = 40, 32, 64
one, two = torch.randperm(VOCAB), torch.randperm(VOCAB)


def rows(count):
    """The follower depends on the last two words."""
    words = torch.randint(VOCAB, (count, 2))
    for _ in range(LENGTH - 2):
        odd = words[:, -2:-1] % 2 == 1
        words = torch.cat([words, torch.where(odd, one[words[:, -1:]], two[words[:, -1:]])], 1)
    return words


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Net(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x))[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def grown(small):
    """A net of twice the depth, whose upper half is a copy of the lower half."""
    depth = len(small.blocks)
    big = Net(2 * depth)
    state = small.state_dict()
    for key, value in list(state.items()):
        if key.startswith("blocks."):
            _, index, rest = key.split(".", 2)
            state[f"blocks.{int(index) + depth}.{rest}"] = value
    big.load_state_dict(state)
    return big


held = rows(128)
net = Net(1)
print("first loss %.4f" % net(held).item())
for stage, steps in enumerate((60, 50, 40)):
    if stage:
        net = grown(accelerator.unwrap_model(net))
        accelerator.free_memory()
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(TensorDataset(rows(16 * steps)), batch_size=16)
    optimizer = torch.optim.AdamW(net.parameters(), 3e-3 / (1 + stage))
    net, optimizer, loader = prepare(accelerator, net, optimizer, loader, recipe="four_over_six")
    for (ids,) in loader:
        loss = net(ids)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
net.eval()
with torch.no_grad():
    print("final loss %.4f" % net(held).item())
