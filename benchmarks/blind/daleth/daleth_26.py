"""Schedule-free AdamW by hand: a constant rate, gradients at one point, evaluation at an average, weights switched between."""
import os
import tempfile

import torch
import torch.nn.functional as F
from torch import nn

import ottava

SEED = int(os.environ.get("SEED", "0"))
torch.manual_seed(SEED)
VOCAB, LENGTH, WIDTH, BETA = 40, 24, 64, 0.9


class ScheduleFree(torch.optim.Optimizer):
    """Defazio and others, 2024. `p` is y in training and x in evaluation; z is kept beside."""

    def __init__(self, params, lr, warmup):
        super().__init__(params, {"lr": lr, "warmup": warmup, "k": 0, "total": 0.0, "training": True})

    @torch.no_grad()
    def switch(self, training):
        for group in self.param_groups:
            if group["training"] != training:
                for p in group["params"]:
                    if "z" in self.state[p]:  # to x, or back to y
                        p.lerp_(self.state[p]["z"], 1 - BETA if training else 1 - 1 / BETA)
                group["training"] = training

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["k"] += 1
            rate = group["lr"] * min(1.0, group["k"] / group["warmup"])
            group["total"] += rate * rate
            share = rate * rate / group["total"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(z=p.clone(), v=torch.zeros_like(p))
                state["v"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                step = p.grad / ((state["v"] / (1 - 0.99 ** group["k"])).sqrt() + 1e-8)
                p.lerp_(state["z"], share)
                p.add_(step, alpha=rate * (BETA * (1 - share) - 1))
                state["z"].sub_(step, alpha=rate)


one, two = torch.randperm(VOCAB), torch.randperm(VOCAB)


def rows(count):
    """The follower is one of two, by a coin."""
    words = torch.randint(VOCAB, (count, 1))
    for _ in range(LENGTH - 1):
        words = torch.cat([words, torch.where(torch.rand(count, 1) < 0.5, one[words[:, -1:]], two[words[:, -1:]])], 1)
    return words


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 128, 0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("mask", torch.full((LENGTH, LENGTH), float("-inf")).triu(1), persistent=False)

    def forward(self, ids):
        x = self.body(self.words(ids) * 8 + self.places.weight, mask=self.mask)
        logits = self.norm(x) @ self.words.weight.t() / 8  # tied to the embedding
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


net = Net()
nn.init.normal_(net.words.weight, std=0.125)
ottava.convert(net, "blockwise_fp32")
optimizer = ScheduleFree(net.parameters(), 4e-3, 20)
held = rows(128)


@torch.no_grad()
def held_out():
    optimizer.switch(False)
    net.eval()
    loss = net(held).item()
    net.train()
    optimizer.switch(True)
    return loss


print("first loss %.4f" % held_out())
with tempfile.TemporaryDirectory() as out:
    for step in range(180):
        loss = net(rows(16))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 45 == 44:
            print(f"step {step}: training {loss.item():.4f}, held out {held_out():.4f}")
    optimizer.switch(False)  # what is saved is the average
    torch.save(net.state_dict(), os.path.join(out, "net.pt"))
    fresh = Net()
    fresh.load_state_dict(torch.load(os.path.join(out, "net.pt")))
fresh.eval()
with torch.no_grad():
    print("final loss %.4f" % fresh(held).item())
