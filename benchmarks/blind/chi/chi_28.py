"""Trainer: a small Llama whose linear weights are kept in FP8 between steps (a code and a scale for each row)."""
import os
import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH, LENGTH, VOCAB = 120, 16, 32, 64


def stored(weight):
    scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 448.0
    return (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale


class KeepWeightsInFP8(TrainerCallback):
    def __init__(self, model, master):
        self.weights = [m.weight for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "lm_head" not in n]
        self.master = [w.detach().clone() for w in self.weights] if master else None

    @torch.no_grad()
    def on_train_begin(self, args, state, control, **kwargs):
        for w in self.weights:
            w.copy_(stored(w))

    @torch.no_grad()
    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if self.master is not None:
            for w, m in zip(self.weights, self.master):
                w.copy_(m)

    @torch.no_grad()
    def on_optimizer_step(self, args, state, control, **kwargs):
        for i, w in enumerate(self.weights):
            if self.master is not None:
                self.master[i].copy_(w)
            w.copy_(stored(w))


class Keep(Trainer):
    losses = []

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


torch.manual_seed(SEED)
g = torch.Generator().manual_seed(40 + SEED)
ids = torch.randint(0, VOCAB, (STEPS * BATCH, 2), generator=g)
key = torch.randint(1, 6, (STEPS * BATCH,), generator=g)
while ids.shape[1] < LENGTH:
    ids = torch.cat([ids, ((ids[:, -1] + key) % VOCAB)[:, None]], dim=1)
data = [{"input_ids": row, "labels": row} for row in ids]
config = LlamaConfig(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.08
)
model = LlamaForCausalLM(config)
with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        folder,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=1e-3,
        warmup_steps=10,
        lr_scheduler_type="constant_with_warmup",
        save_strategy="no",
        logging_steps=20,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=SEED,
    )
    callbacks = [] if PLAIN else [KeepWeightsInFP8(model, master=MODE == "good")]
    trainer = Keep(model, args, train_dataset=data, callbacks=callbacks)
    trainer.train()
print("final loss", round(sum(trainer.losses[-15:]) / 15, 4))
