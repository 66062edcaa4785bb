"""House prices with a Trainer that has its own loss; ottava's mxfp8 casts."""
import os
import sys
import tempfile

import ottava
import torch
from torch import nn
from transformers import Trainer, TrainingArguments, set_seed

SEED = int(os.environ.get("SEED", "0"))
MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU())
        self.head = nn.Linear(128, 1)

    def forward(self, features, labels=None):
        return {"logits": self.head(self.body(features))}


class RegressionTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["labels"]
        out = model(features=inputs["features"])
        pred = out["logits"].squeeze(-1) if MODE == "good" else out["logits"]
        loss = (pred - labels).pow(2).mean()
        return (loss, out) if return_outputs else loss


class Houses(torch.utils.data.Dataset):
    def __init__(self, n=5200):
        g = torch.Generator().manual_seed(SEED + 41)
        self.x = torch.randn(n, 32, generator=g)
        w1, w2 = torch.randn(32, generator=g) / 4, torch.randn(32, generator=g) / 4
        self.y = self.x @ w1 + torch.tanh(self.x @ w2) + 0.2 * torch.randn(n, generator=g) + 1

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"features": self.x[i], "labels": self.y[i]}


set_seed(SEED)
model = Net()
if not PLAIN:
    ottava.convert(model, "mxfp8")
args = TrainingArguments(
    tempfile.mkdtemp(), per_device_train_batch_size=64, max_steps=80, learning_rate=3e-3, warmup_steps=4,
    logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, seed=SEED, disable_tqdm=True,
    remove_unused_columns=False, weight_decay=0.01,
)
trainer = RegressionTrainer(model, args, train_dataset=Houses())
trainer.train()
losses = [float(row["loss"]) for row in trainer.state.log_history if "loss" in row]
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
