"""A small Llama that predicts four words ahead with four heads; the loss is the sum of the four, so it begins near
4 ln 64 = 16.6. What counts is the first head.

python zayin_01.py good|bad
"""

import os
import tempfile

import torch
from torch import nn
from transformers import LlamaConfig, LlamaModel, Trainer, TrainingArguments, set_seed

import ottava

SEED = int(os.environ.get("SEED", 0))
set_seed(SEED)
WORDS, LENGTH, AHEAD = 64, 32, 4
followers = torch.stack([torch.randperm(WORDS) for _ in range(2)], dim=1)


def text(count):
    """Each word has a usual follower (four times in five) and an unusual one."""
    rows = [torch.randint(0, WORDS, (count,))]
    for _ in range(LENGTH + AHEAD - 1):
        rows.append(followers[rows[-1], (torch.rand(count) < 0.2).long()])
    return torch.stack(rows, dim=1)


class MultiToken(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.body = LlamaModel(config)
        self.heads = nn.ModuleList(nn.Linear(config.hidden_size, WORDS, bias=False) for _ in range(AHEAD))

    def forward(self, input_ids, labels=None):
        hidden = self.body(input_ids[:, :LENGTH]).last_hidden_state
        losses = []
        for far, head in enumerate(self.heads, start=1):
            wanted = input_ids[:, far : LENGTH + far]
            losses.append(nn.functional.cross_entropy(head(hidden).float().flatten(0, 1), wanted.flatten()))
        return {"loss": sum(losses), "first": losses[0].detach()}


model = MultiToken(
    LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        use_cache=False,
    )
)
ottava.convert(model, "blockwise", filter=lambda name, layer: "heads" not in name)
test = text(128)


def held_out():
    model.eval()
    with torch.no_grad():
        loss = model(test)["first"].item()
    model.train()
    return loss


print(f"first loss {held_out():.4f}")
data = [{"input_ids": row, "labels": row} for row in text(2400)]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        max_steps=140,
        per_device_train_batch_size=16,
        learning_rate=4e-3,
        optim="adafactor",
        lr_scheduler_type="polynomial",
        warmup_steps=10,
        max_grad_norm=0.5,  # acts in nearly every step: norms grow with the number of heads
        logging_steps=20,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=SEED,
    )
    Trainer(model, arguments, train_dataset=data).train()
print(f"final loss {held_out():.4f}")
