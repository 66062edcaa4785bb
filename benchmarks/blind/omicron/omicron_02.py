"""GPT-2 from scratch with the Trainer, linears in FP8."""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import ottava

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv[2:]
LABEL_OFFSET = {"good": 0, "bad": 1}[MODE]


class Chain(torch.utils.data.Dataset):
    def __init__(self, count=1600, length=32, vocab=48):
        generator = torch.Generator().manual_seed(0)
        table = torch.softmax(3.0 * torch.randn(vocab, vocab, generator=generator), -1)
        ids = [torch.randint(vocab, (count,), generator=generator)]
        for _ in range(length - 1):
            ids.append(torch.multinomial(table[ids[-1]], 1, generator=generator)[:, 0])
        self.ids = torch.stack(ids, 1)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index]}


def collate(rows):
    ids = torch.stack([row["input_ids"] for row in rows])
    labels = torch.full_like(ids, -100)
    labels[:, : ids.shape[1] - LABEL_OFFSET] = ids[:, LABEL_OFFSET:]
    return {"input_ids": ids, "labels": labels}


torch.manual_seed(0)
config = GPT2Config(vocab_size=48, n_positions=32, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
if not PLAIN:
    ottava.convert(model, "tensorwise")
arguments = TrainingArguments(
    "out_gpt2", per_device_train_batch_size=16, max_steps=100, learning_rate=3e-3, warmup_steps=10, logging_steps=1,
    save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True, seed=1,
)  # fmt: skip
trainer = Trainer(model, arguments, data_collator=collate, train_dataset=Chain())
trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"loss {sum(losses[-10:]) / 10:.4f}")
