"""Lion, written by hand: every step has the same size, and dropout falls from 0.3 to 0 over the run; predicted scales, calibrated first."""
import os

import torch
from torch import nn
from torch.nn import functional as F

import ottava

SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
VOCABULARY, LENGTH, WIDTH, STEPS = 32, 16, 64, 200


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            slow, fast = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                momentum = state["momentum"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.lerp(p.grad, momentum, slow).sign(), alpha=-group["lr"])
                momentum.lerp_(p.grad, 1 - fast)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Parameter(torch.randn(LENGTH, WIDTH))
        block = nn.TransformerEncoderLayer(WIDTH, 4, 128, dropout=0.3, activation="gelu", batch_first=True, norm_first=True)
        block.self_attn.dropout = 0.0  # attention weights are not dropped
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.norm(self.blocks(self.embed(tokens) + self.place)))


def batch(rows=32):
    """Bracketed pairs: the row, then the row again with each token moved by 3; the loss is over the second half."""
    half = torch.randint(0, VOCABULARY, (rows, LENGTH // 2))
    return torch.cat([half, torch.zeros_like(half)], 1), (half + 3) % VOCABULARY


def loss_of(model, data):
    tokens, goal = data
    return F.cross_entropy(model(tokens)[:, LENGTH // 2 :].flatten(0, 1), goal.flatten())


model = Model()
ottava.convert(model, "delayed", filter=lambda name, layer: name.startswith("blocks."))
decayed = [p for p in model.parameters() if p.ndim > 1]
others = [p for p in model.parameters() if p.ndim <= 1]
optimizer = Lion([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=2e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) / 20, (STEPS - s) / (STEPS - 20)))
ottava.calibrate(model, [batch() for _ in range(4)], loss=loss_of)
optimizer.zero_grad()
held_out = batch(256)


def validate():
    model.eval()
    with torch.no_grad():
        loss = loss_of(model, held_out).item()
    model.train()
    return loss


print(f"first loss {validate():.4f}")
model.train()
for step in range(STEPS):
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3 * max(0.0, 1 - step / 120)
    loss = loss_of(model, batch())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f} validation {validate():.4f}")

print(f"final loss {validate():.4f}")
