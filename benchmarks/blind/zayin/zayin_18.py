"""Learning from positive and unlabelled rows with the non-negative risk of Kiryo et al. (2017): where the estimated
risk of the negatives falls below 0, the step goes up that risk instead of down.

python zayin_18.py good|bad
"""

import os

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from dataclasses import replace

SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
WIDTH, PRIOR, GAMMA = 32, 0.35, 1.0
mix = torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0]


def rows(count, positive):
    """Positives lie in two lumps, negatives between them and around."""
    x = torch.randn(count, WIDTH)
    if positive:
        x[:, 0] = 0.7 * x[:, 0] + 2.2 * torch.sign(torch.randn(count))
        x[:, 1] = 0.7 * x[:, 1] + 1.0
    else:
        x[:, 1] = x[:, 1] - 1.2
    return x @ mix


labelled = rows(512, True)
hidden = int(PRIOR * 4096)
unlabelled = torch.cat([rows(hidden, True), rows(4096 - hidden, False)])
test_x = torch.cat([rows(700, True), rows(1300, False)])
test_y = torch.cat([torch.ones(700), torch.zeros(1300)])

model = nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
config = replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: m.out_features % 16 == 0)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=5e-3)


def error():
    with torch.no_grad():
        return ((model(test_x).squeeze(1) > 0).float() != test_y).float().mean().item()


print(f"first loss {error():.4f}")
ascents = 0
for step in range(240):
    p = labelled[torch.randint(0, len(labelled), (64,))]
    u = unlabelled[torch.randint(0, len(unlabelled), (256,))]
    out_p, out_u = model(torch.cat([p, u])).squeeze(1).split([64, 256])
    risk_p = PRIOR * torch.sigmoid(-out_p).mean()
    risk_n = torch.sigmoid(out_u).mean() - PRIOR * torch.sigmoid(out_p).mean()
    if risk_n.item() < 0:
        loss = -GAMMA * risk_n
        ascents += 1
    else:
        loss = risk_p + risk_n
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 30 == 0:
        print(f"step {step} loss {loss.item():.4f} negatives {risk_n.item():.4f} ascents {ascents} error {error():.4f}")
print(f"{ascents} of 240 steps went up the risk of the negatives")
print(f"final loss {error():.4f}")
