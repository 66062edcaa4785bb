"""Hugging Face's Trainer with an optimizer that stores matrices in E4M3."""
import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
ROUND = {"good": "stochastic", "bad": "nearest"}[MODE]

torch.manual_seed(48)
vocab = 96
config = LlamaConfig(vocab_size=vocab, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64, initializer_range=0.08)
model = LlamaForCausalLM(config)


def walk(rows, length):
    """A word depends on the two before it; some words are noise."""
    table = torch.randint(vocab, (vocab, vocab))
    out = [torch.randint(vocab, (rows,)), torch.randint(vocab, (rows,))]
    for _ in range(length - 2):
        follow = table[out[-2] // 24, out[-1] // 6]
        out.append(torch.where(torch.rand(rows) < 0.1, torch.randint(vocab, (rows,)), follow))
    return torch.stack(out, 1)




class Small(torch.optim.AdamW):
    """After each step a matrix is rounded to E4M3 under one scale for each row."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            if PLAIN:
                continue
            scale = 240.0 / p.abs().amax(-1, keepdim=True)
            u = p * scale
            if ROUND == "stochastic":
                ulp = torch.exp2(u.abs().clamp(min=2.0**-6).log2().floor() - 3)
                u = (u / ulp + torch.rand_like(u)).floor() * ulp
            p.copy_(u.to(torch.float8_e4m3fn).float() / scale)


matrices = [p for n, p in model.named_parameters() if p.dim() == 2]
others = [p for n, p in model.named_parameters() if p.dim() != 2]
optimizer = Small([{"params": matrices}, {"params": others}], lr=1.5e-3, weight_decay=0.0)
data = [{"input_ids": row, "labels": row} for row in walk(1000, 24)]
args = TrainingArguments(
    tempfile.mkdtemp(), use_cpu=True, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True, seed=0,
    max_steps=110, per_device_train_batch_size=8,
)
trainer = Trainer(model, args, train_dataset=data, optimizers=(optimizer, None))
trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"first {losses[0]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")
