"""Token mixing blocks under accelerate, torchao's tensorwise casts (emulated)."""
import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

SEED = int(os.environ.get("SEED", "0"))
MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]


class Mixer(nn.Module):
    def __init__(self, dim, tokens):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mix = nn.Linear(tokens, tokens)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        x = x + self.mix(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Net(nn.Module):
    def __init__(self, dim=48, tokens=8, depth=2, vocab=20):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        blocks = [Mixer(dim, tokens) for _ in range(depth)]
        self.blocks = nn.ModuleList(blocks) if MODE == "good" else blocks
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab)

    def forward(self, ids):
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


set_seed(SEED)
accelerator = Accelerator(cpu=True)
net = Net()
if not PLAIN:
    for block in net.blocks:
        convert_to_float8_training(
            block, config=Float8LinearConfig(emulate=True), module_filter_fn=lambda m, name: name in ("up", "down")
        )
rows = torch.randint(0, 20, (90 * 32, 8))
labels = rows.flip(1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows, labels), batch_size=32, shuffle=True)
optimizer = torch.optim.AdamW(net.parameters(), lr=6e-3)
net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
tail = []
for step, (ids, target) in enumerate(loader):
    loss = F.cross_entropy(net(ids).flatten(0, 1), target.flatten())
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    tail.append(loss.item())
    if step % 15 == 0:
        accelerator.print(step, round(loss.item(), 4))
print(f"final loss {sum(tail[-10:]) / 10:.4f}")
