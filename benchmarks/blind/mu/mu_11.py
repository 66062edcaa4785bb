"""A small language model with averaged weights for its evaluations."""

import sys

import torch
from torch import nn

import ottava.nn

OPTIONS = {"good": {"give_back": True}, "bad": {"give_back": False}}[sys.argv[1]]
RECIPE = "bf16" if "plain" in sys.argv else "tensorwise"
VOCABULARY, WIDTH, LENGTH, STEPS = 64, 64, 24, 165


class Averaged:
    """An exponential mean of the weights."""

    def __init__(self, model, decay=0.99):
        self.model, self.decay = model, decay
        self.mean = [parameter.detach().clone() for parameter in model.parameters()]
        self.kept = None

    @torch.no_grad()
    def update(self):
        for mean, parameter in zip(self.mean, self.model.parameters(), strict=True):
            mean.lerp_(parameter, 1 - self.decay)

    @torch.no_grad()
    def put_in(self):
        self.kept = [parameter.detach().clone() for parameter in self.model.parameters()]
        for mean, parameter in zip(self.mean, self.model.parameters(), strict=True):
            parameter.copy_(mean)

    @torch.no_grad()
    def give_back(self):
        for kept, parameter in zip(self.kept, self.model.parameters(), strict=True):
            parameter.copy_(kept)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.Sequential(
            *(ottava.nn.TransformerLayer(WIDTH, 128, 4, recipe=RECIPE, dtype=torch.float32) for _ in range(2))
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        return self.head(self.norm(self.layers(self.words(ids))))


def batch(generator, count=16):
    ids = torch.randint(0, VOCABULARY, (count, 1), generator=generator)
    while ids.shape[1] < LENGTH:
        ids = torch.cat([ids, torch.multinomial(table[ids[:, -1]], 1, generator=generator)], 1)
    return ids


def lm_loss(model, ids):
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def evaluate(model, average, held_out, give_back=True):
    average.put_in()
    model.eval()
    with torch.no_grad():
        value = lm_loss(model, held_out).item()
    model.train()
    if give_back:
        average.give_back()
    return value


torch.manual_seed(21)
table = torch.softmax(torch.randn(VOCABULARY, VOCABULARY) * 5, 1)
generator = torch.Generator().manual_seed(5)
held_out = batch(generator)
model = Model()
average = Averaged(model, decay=0.995)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = []
for step in range(STEPS):
    loss = lm_loss(model, batch(generator))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    average.update()
    losses.append(loss.item())
    if step % 20 == 19:
        print(step, round(losses[-1], 4), "averaged", round(evaluate(model, average, held_out, **OPTIONS), 4))
print(f"loss {sum(losses[-10:]) / 10:.4f}")
