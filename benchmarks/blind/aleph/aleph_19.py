"""FP16 autocast with a gradient scaler that begins at 2**20: the first steps overflow and are skipped until the scale has come down."""
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
STEPS = 200


def digits(count):
    """Blurred bars at one of ten angles in a 16x16 picture, with noise."""
    label = torch.randint(0, 10, (count,))
    angle = label.float() * torch.pi / 10 + 0.06 * torch.randn(count)
    grid = torch.linspace(-1, 1, 16)
    y, x = torch.meshgrid(grid, grid, indexing="ij")
    shift = 0.2 * torch.randn(count, 1, 1)
    distance = x * angle.sin()[:, None, None] - y * angle.cos()[:, None, None] + shift
    return torch.exp(-(distance**2) / 0.03) + 0.3 * torch.randn(count, 16, 16), label


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(256, 256)
        self.middle = nn.ModuleList(nn.Linear(256, 256) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(256) for _ in range(2))
        self.head = nn.Linear(256, 10)

    def forward(self, x):
        h = self.enter(x.flatten(1)).relu()
        for norm, layer in zip(self.norms, self.middle, strict=True):
            h = h + layer(norm(h)).relu()
        return self.head(h)


train = DataLoader(TensorDataset(*digits(128 * 50)), batch_size=128, shuffle=True, drop_last=True)
held_x, held_y = digits(1024)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=60)
criterion = nn.CrossEntropyLoss()


def validate():
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        out = model(held_x)
    model.train()
    return criterion(out.float(), held_y).item(), (out.argmax(1) == held_y).float().mean().item()


print(f"first loss {validate()[0]:.4f}")
step = skipped = 0
while step < STEPS:
    for x, y in train:
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
        loss = criterion(out.float(), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < before:
            skipped += 1
        else:
            scheduler.step()  # the schedule counts steps that were made
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f} scale {scaler.get_scale():.0f} skipped {skipped}")
        step += 1
        if step == STEPS:
            break

loss, accuracy = validate()
print(f"accuracy {accuracy:.3f}, {skipped} steps skipped")
print(f"final loss {loss:.4f}")
