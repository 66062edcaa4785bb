"""Masked words with a share of masks that falls from 0.8 to 0.15 under the Trainer: the task gets easier while the
network learns.

The linears of the encoder are cast by hand: E4M3 forward, E5M2 for gradients, one scale a tensor.
"""

import os
import tempfile

import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainerCallback, TrainingArguments

SEED = int(os.environ.get("SEED", "0"))
WORDS, LENGTH, STEPS, MASK = 40, 24, 220, 1


def cast(x, kind):
    """To FP8 and back, with the largest number at the top of the format."""
    scale = torch.finfo(kind).max / x.abs().amax().clamp(min=1e-12)
    return (x * scale).to(kind).to(x.dtype) / scale


class Gemm(torch.autograd.Function):
    """y = x w.T with FP8 operands in all three products."""

    @staticmethod
    def forward(ctx, x, w):
        x, w = cast(x, torch.float8_e4m3fn), cast(w, torch.float8_e4m3fn)
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dy = cast(dy, torch.float8_e5m2)
        return dy @ w, dy.flatten(0, -2).T @ x.flatten(0, -2)


class Linear8(nn.Linear):
    """A linear layer with these casts."""

    def forward(self, x):
        return Gemm.apply(x, self.weight) + self.bias


class Masks(TrainerCallback):
    """Moves the share of masks of the collator."""

    def __init__(self):
        self.share = 0.8

    def on_step_begin(self, args, state, control, **kwargs):
        self.share = 0.8 + (0.15 - 0.8) * min(1.0, state.global_step / (0.8 * STEPS))

    def collate(self, rows):
        rows = torch.stack([r["input_ids"] for r in rows])
        hidden = torch.rand(rows.shape) < self.share
        return {"input_ids": rows.masked_fill(hidden, MASK), "labels": rows.masked_fill(~hidden, -100)}


def texts(number, generator):
    """A motif of four words, again and again."""
    motif = torch.randint(2, WORDS, (number, 4), generator=generator)
    return [{"input_ids": m.repeat(LENGTH // 4)} for m in motif]


@torch.no_grad()
def evaluate(model, rows):
    """Loss with 15 % of the words masked, always the same ones."""
    model.eval()
    hidden = torch.rand(rows.shape, generator=torch.Generator().manual_seed(3)) < 0.15
    loss = model(input_ids=rows.masked_fill(hidden, MASK), labels=rows.masked_fill(~hidden, -100)).loss.item()
    model.train()
    return loss


def main():
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(21 + SEED)
    train, held = texts(5000, generator), torch.stack([r["input_ids"] for r in texts(300, generator)])
    config = BertConfig(
        vocab_size=WORDS, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=LENGTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        initializer_range=0.08,
    )
    model = BertForMaskedLM(config)
    for layer in model.bert.encoder.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = Linear8
    print("first loss", round(evaluate(model, held), 4))
    masks = Masks()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=32, learning_rate=2e-3, warmup_steps=20,
            lr_scheduler_type="constant_with_warmup", logging_steps=20, save_strategy="no", report_to=[], use_cpu=True,
            disable_tqdm=True, seed=SEED,
        )
        Trainer(model, args, train_dataset=train, data_collator=masks.collate, callbacks=[masks]).train()
    print("final loss", round(evaluate(model, held), 4))


if __name__ == "__main__":
    main()
