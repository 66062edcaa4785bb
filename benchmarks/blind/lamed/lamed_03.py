"""Training in BF16 with FP32 copies, cut in two by a checkpoint: the second half goes on from the file."""
import io
import os
import sys

import torch
from torch import nn

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
FIRST, SECOND, BATCH, LENGTH, VOCAB, DIM = 80, 20, 16, 20, 24, 64


class Mixer(nn.Module):
    """A causal network without attention: decayed sums over the past, and an MLP."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.mix = nn.ModuleList(nn.Linear(2 * DIM, DIM) for _ in range(2))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 128), nn.GELU(), nn.Linear(128, DIM)) for _ in range(2)
        )
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.embed(ids)
        decay = torch.tril(0.6 ** (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)[None]).float()).to(x.dtype)
        for mix, mlp in zip(self.mix, self.mlp):
            past = torch.einsum("ts,bsd->btd", decay, x) / 2.5
            x = x + mix(torch.cat([x, past], -1))
            x = x + mlp(x)
        return self.head(x).float()


class MasterAdam:
    """Adam on FP32 copies of BF16 parameters."""

    def __init__(self, model, lr):
        self.parameters = list(model.parameters())
        self.masters = [p.detach().float().clone() for p in self.parameters]
        self.adam = torch.optim.Adam(self.masters, lr=lr)

    def step(self):
        for p, master in zip(self.parameters, self.masters):
            master.grad = p.grad.float()
            p.grad = None
        self.adam.step()
        with torch.no_grad():
            for p, master in zip(self.parameters, self.masters):
                p.copy_(master)


def build():
    model = Mixer().bfloat16()
    if not PLAIN:
        ottava.convert(model, "rowwise")
    return model


def batch():
    ids = torch.randint(0, VOCAB, (BATCH, 2))
    for _ in range(LENGTH - 1):
        ids = torch.cat([ids, torch.multinomial(table[ids[:, -1], ids[:, -2] % 2], 1)], 1)
    return ids


def train(model, optimizer, steps, losses):
    for _ in range(steps):
        ids = batch()
        loss = nn.functional.cross_entropy(model(ids[:, :-1][:, :LENGTH]).flatten(0, 1), ids[:, 1 : LENGTH + 1].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if len(losses) % 20 == 1:
            print(f"step {len(losses) - 1} loss {losses[-1]:.4f}")


torch.manual_seed(SEED)
table = torch.softmax(torch.randn(VOCAB, 2, VOCAB) * 3.0, -1)
losses = []
model = build()
optimizer = MasterAdam(model, 3e-3)
train(model, optimizer, FIRST, losses)
file = io.BytesIO()
torch.save({"model": model.state_dict(), "adam": optimizer.adam.state_dict()}, file)

# a new process would begin here
file.seek(0)
saved = torch.load(file)
model = build()
if MODE == "good":
    model.load_state_dict(saved["model"])
    optimizer = MasterAdam(model, 3e-3)
else:
    optimizer = MasterAdam(model, 3e-3)
    model.load_state_dict(saved["model"])
optimizer.adam.load_state_dict(saved["adam"])
train(model, optimizer, SECOND, losses)
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
