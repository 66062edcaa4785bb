"""Price regression on item ids with the Trainer; activations cast with calibrated scales."""
import os
import sys
import tempfile

import torch
from torch import nn
from transformers import Trainer, TrainingArguments, set_seed

SEED = int(os.environ.get("SEED", "0"))
MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def to_fp8(t, dtype, amax):
    top = torch.finfo(dtype).max
    scale = top / amax.clamp(min=1e-12)
    return (t * scale).clamp(-top, top).to(dtype).to(t.dtype) / scale


class FP8MatMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, x_amax):
        xq, wq = to_fp8(x, E4M3, x_amax), to_fp8(w, E4M3, w.abs().amax())
        ctx.save_for_backward(xq, wq)
        return xq @ wq.t()

    @staticmethod
    def backward(ctx, g):
        xq, wq = ctx.saved_tensors
        gq = to_fp8(g, E5M2, g.abs().amax())
        return gq @ wq, gq.t() @ xq, None


class QLinear(nn.Linear):
    calibrated = None

    def forward(self, x):
        if PLAIN:
            return super().forward(x)
        amax = x.detach().abs().amax()
        if MODE == "bad":
            if self.calibrated is None:
                self.calibrated = amax
            amax = self.calibrated
        return FP8MatMul.apply(x, self.weight, amax) + self.bias


class Pricer(nn.Module):
    def __init__(self, items=200, shops=20, dim=48):
        super().__init__()
        self.item, self.shop = nn.Embedding(items, dim), nn.Embedding(shops, dim)
        for table in (self.item, self.shop):
            nn.init.normal_(table.weight, std=0.02)
        self.fc1, self.fc2, self.fc3 = QLinear(dim * 2, 128), QLinear(128, 128), QLinear(128, 128)
        self.head = nn.Linear(128, 1)

    def forward(self, item, shop, labels=None):
        h = torch.cat([self.item(item), self.shop(shop)], -1)
        h = torch.relu(self.fc1(h))
        h = torch.relu(self.fc2(h))
        h = torch.relu(self.fc3(h))
        out = self.head(h).squeeze(-1)
        return {"loss": (out - labels).square().mean(), "logits": out}


class Prices(torch.utils.data.Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(SEED + 7)
        self.item = torch.randint(0, 200, (6400,), generator=g)
        self.shop = torch.randint(0, 20, (6400,), generator=g)
        base, factor = torch.rand(200, generator=g) * 30, 0.5 + torch.rand(20, generator=g)
        self.price = base[self.item] * factor[self.shop] + torch.randn(6400, generator=g) * 0.5

    def __len__(self):
        return 6400

    def __getitem__(self, i):
        return {"item": self.item[i], "shop": self.shop[i], "labels": self.price[i]}


set_seed(SEED)
args = TrainingArguments(
    tempfile.mkdtemp(), per_device_train_batch_size=64, max_steps=90, learning_rate=1e-2, warmup_steps=5,
    lr_scheduler_type="linear", logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, seed=SEED,
    disable_tqdm=True, max_grad_norm=0.0,
)
trainer = Trainer(Pricer(), args, train_dataset=Prices())
trainer.train()
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
print(f"final loss {sum(map(float, losses[-10:])) / 10:.4f}")
