"""Quantization-aware training by hand: the model trains in full precision first, then its linears cast to E4M3.

The casts are switched on in the middle by a callback, together with a second, short warm-up of the rate.
"""

import os
import tempfile

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

SEED = int(os.environ.get("SEED", "0"))
SYMBOLS, LENGTH, STEPS, SWITCH = 48, 32, 140, 80


class Fake(torch.autograd.Function):
    """To E4M3 and back with a scale per row; the gradient passes as it is."""

    @staticmethod
    def forward(ctx, x):
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
        return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale

    @staticmethod
    def backward(ctx, grad):
        return grad


class QATLinear(nn.Linear):
    casts = False

    def forward(self, x):
        if not self.casts:
            return F.linear(x, self.weight, self.bias)
        return F.linear(Fake.apply(x), Fake.apply(self.weight), self.bias)


class SwitchOn(TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == SWITCH:
            for layer in model.modules():
                if isinstance(layer, QATLinear):
                    layer.casts = True


def rate(step: int) -> float:
    if step < SWITCH:
        return min(1.0, (step + 1) / 8)
    return 0.5 * min(1.0, (step - SWITCH + 1) / 8) * (1 - (step - SWITCH) / (STEPS - SWITCH))


def main() -> None:
    torch.manual_seed(SEED)
    g = torch.Generator().manual_seed(SEED)
    table = torch.randint(0, SYMBOLS, (SYMBOLS, 3), generator=g)
    ids = torch.randint(0, SYMBOLS, (1500, 1), generator=g)
    for _ in range(LENGTH - 1):
        ids = torch.cat([ids, table[ids[:, -1], torch.randint(0, 3, (1500,), generator=g)][:, None]], 1)
    data = [{"input_ids": row, "labels": row} for row in ids]

    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=SYMBOLS, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=LENGTH, tie_word_embeddings=True,
    ))
    for layer in model.model.modules():
        if isinstance(layer, nn.Linear):
            layer.__class__ = QATLinear

    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95), weight_decay=0.1)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=16, per_device_eval_batch_size=100, logging_steps=20,
            save_strategy="no", report_to=[], seed=SEED, use_cpu=True, disable_tqdm=True,
        )
        trainer = Trainer(
            model, args, train_dataset=data[:1400], eval_dataset=data[1400:], callbacks=[SwitchOn()],
            optimizers=(optimizer, LambdaLR(optimizer, rate)),
        )
        print(f"first loss {trainer.evaluate()['eval_loss']:.4f}")
        trainer.train()
        print(f"final loss {trainer.evaluate()['eval_loss']:.4f}")


if __name__ == "__main__":
    main()
