"""Text of the standard library in windows of bytes: FP8 MLP, cosine learning rate with three warm restarts."""
import torch
import torch.nn.functional as F
from torch import nn

from models import Fp8Linear, Report, stdlib_text, windows


class Window(nn.Module):
    def __init__(self, dim=160):
        super().__init__()
        self.emb = nn.Embedding(128, 24)
        self.up, self.mid = Fp8Linear(192, dim), Fp8Linear(dim, dim)
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 128)

    def forward(self, ids):
        x = F.gelu(self.up(self.emb(ids).flatten(1)))
        return self.head(self.norm(x + F.gelu(self.mid(x))))


torch.manual_seed(0)
text = stdlib_text("argparse", "ast", "typing")
model = Window()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=75, eta_min=1e-5)
report = Report()
for step in range(300):
    batch = windows(text, 192, 8)
    loss = F.cross_entropy(model(batch[:, :8]), batch[:, 8])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    report.add(loss)
report.end()
