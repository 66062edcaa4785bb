"""Energies of molecules from descriptors: an MLP in the Trainer of transformers."""

import os
import sys
import tempfile

import torch
from torch import nn
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments, set_seed

SEED = int(os.environ.get("SEED", "0"))
MODE = sys.argv[1]


class Molecules(torch.utils.data.Dataset):
    def __init__(self, count, seed):
        g = torch.Generator().manual_seed(26)
        w, v = torch.randn(20, 30, generator=g) / 4, torch.randn(30, generator=g) / 4
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 20, generator=g)
        self.y = torch.sin(self.x @ w) @ v + 0.1 * torch.randn(count, generator=g)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return {"descriptors": self.x[i], "labels": self.y[i]}


class Energy(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(20, width),
            nn.SiLU(),
            nn.LayerNorm(width),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, 1),
        )

    def forward(self, descriptors, labels=None):
        energy = self.mlp(descriptors).squeeze(-1)
        loss = None if labels is None else nn.functional.smooth_l1_loss(energy, labels)
        return {"loss": loss, "logits": energy}


def main():
    set_seed(SEED)
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(
            output_dir=out,
            max_steps=200,
            per_device_train_batch_size=32,
            learning_rate=3e-3,
            lr_scheduler_type="cosine",
            warmup_steps=20,
            weight_decay=0.01,
            logging_steps=10,
            eval_strategy="steps",
            eval_steps=50,
            save_strategy="steps",
            save_steps=50,
            save_total_limit=1,
            load_best_model_at_end=True,
            report_to=[],
            use_cpu=True,
            seed=SEED,
            disable_tqdm=True,
        )
        trainer = Trainer(
            Energy(),
            args,
            train_dataset=Molecules(2560, SEED + 1),
            eval_dataset=Molecules(320, SEED + 2),
            callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
        )
        trainer.train()
        final = trainer.evaluate()["eval_loss"]
    print(f"final loss {final:.4f}")


if __name__ == "__main__":
    main()
