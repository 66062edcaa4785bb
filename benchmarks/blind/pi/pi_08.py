"""Masked language model on lists of words, by the Trainer: python pi_08.py good|bad [plain]."""

import sys
import tempfile

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments, set_seed

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv[2:]
VOCABULARY, MASK = 100, 99


class Fake8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        scale = 448 / x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12)
        return (x * scale).to(torch.float8_e4m3fn).to(x.dtype) / scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Linear8(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(Fake8.apply(x), Fake8.apply(self.weight), self.bias)


class Lists(Dataset):
    def __init__(self, count=4000, length=24):
        generator = torch.Generator().manual_seed(6)
        topic = torch.randint(15, (count, 1), generator=generator)
        self.ids = 6 * topic + torch.randint(6, (count, length), generator=generator)
        self.generator = generator

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        ids = self.ids[i].clone()
        labels = torch.full_like(ids, -100)
        chosen = torch.rand(len(ids), generator=self.generator) < 0.15
        labels[chosen] = ids[chosen]
        ids[chosen] = MASK
        return {"input_ids": ids, "labels": labels}


set_seed(6)
model = BertForMaskedLM(
    BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=32,
        tie_word_embeddings=True,
    )
)
if not PLAIN:
    for name, layer in model.named_modules():
        if type(layer) is nn.Linear and "encoder" in name:
            layer.__class__ = Linear8
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=16,
        max_steps=150,
        learning_rate=3e-3,
        warmup_steps=15,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Lists())
    trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"loss {sum(losses[-10:]) / 10:.4f}")
