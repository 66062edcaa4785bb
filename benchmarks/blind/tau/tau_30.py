"""Activity regression from windows of many inertial sensors, under the Trainer and torchao's float8."""
import os
import sys
import tempfile

import torch
from torch import nn
from torch.utils.data import Dataset
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import Trainer, TrainingArguments, TrainerCallback

VARIANT, PLAIN, SEED = sys.argv[1], "plain" in sys.argv, int(os.environ.get("SEED", 0))
RECIPE = {"good": "rowwise_with_gw_hp", "bad": "tensorwise"}[VARIANT]
STEPS = 80


class Windows(Dataset):
    """Each recording has the gain of its device; the target does not depend on it."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        clean = torch.randn(n, 64, generator=g)
        w = torch.randn(64, 16, generator=torch.Generator().manual_seed(5)) / 8
        self.y = torch.tanh(clean / clean.norm(dim=1, keepdim=True) * 8 @ w)
        self.x = clean * 10 ** (torch.randint(0, 2, (n, 1), generator=g) * 6.0)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "labels": self.y[i]}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(64, 128, bias=False)
        self.norm = nn.RMSNorm(128, eps=1e-12)
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128)
        self.head = nn.Linear(128, 16)

    def forward(self, x, labels):
        h = self.norm(self.stem(x))
        h = h + self.down(nn.functional.gelu(self.up(h)))
        out = self.head(h)
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out}


torch.manual_seed(SEED)
model = Net()
if not PLAIN:
    config = Float8LinearConfig.from_recipe_name(RECIPE)
    config = Float8LinearConfig(**{**config.__dict__, "emulate": True})
    convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: name != "head")

losses = []


class Keep(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            losses.append(logs["loss"])


args = TrainingArguments(tempfile.mkdtemp(), max_steps=STEPS, per_device_train_batch_size=64, learning_rate=2e-3, logging_steps=1,
                         save_strategy="no", report_to=[], use_cpu=True, seed=SEED, disable_tqdm=True, max_grad_norm=0.0)
Trainer(model, args, train_dataset=Windows(4096, SEED + 1), callbacks=[Keep()]).train()
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
