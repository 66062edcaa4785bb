"""Fine-tuning of a pretrained encoder with a new head, with ottava's MXFP8 layers."""
import io
import sys

import torch
from torch import nn

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
STRIP = {"good": "module.", "bad": "model."}[MODE]
torch.manual_seed(18)
width, fine, coarse = 128, 64, 8


class Classifier(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 32))
        self.head = nn.Linear(32, classes)

    def forward(self, x):
        return self.head(torch.relu(self.encoder(x)))


# anchors: a class is one of several pairs of signs, so a linear map of the input does not find it
anchors = torch.randn(fine, 64)
flip = torch.where(torch.rand(fine, 1) < 0.5, 1.0, -1.0)


def batch(n, g):
    k = torch.randint(fine, (n,), generator=g)
    sign = torch.where(torch.rand(n, 1, generator=g) < 0.5, 1.0, -1.0)
    return anchors[k] * sign + 0.5 * torch.randn(n, 64, generator=g), k


def fit(model, steps, lr, classes, g, names):
    chosen = [p for n, p in model.named_parameters() if n.startswith(names)]
    optimizer, losses = torch.optim.AdamW(chosen, lr=lr), []
    for _ in range(steps):
        x, k = batch(128, g)
        loss = nn.functional.cross_entropy(model(x), k % classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


g = torch.Generator().manual_seed(19)
file = io.BytesIO()
source = Classifier(fine)
fit(source, 90, 3e-3, fine, g, ("encoder", "head"))
torch.save({f"module.{n}": t for n, t in source.state_dict().items() if n.startswith("encoder")}, file)  # as DDP names them
file.seek(0)
model = Classifier(coarse)
state = {n.removeprefix(STRIP): t for n, t in torch.load(file).items()}
model.load_state_dict(state, strict=False)
if not PLAIN:
    ottava.convert(model, "mxfp8", filter=lambda name, layer: name.startswith("encoder"))
losses = fit(model, 110, 3e-3, coarse, g, ("head", "encoder.4"))
print(f"first {losses[0]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")
