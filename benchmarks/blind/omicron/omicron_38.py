"""A small Qwen2 whose settings come from another code base; Trainer and FP8."""

import sys

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments

import ottava

NORM_EPS = {"good": 1e-5, "bad": 10.0}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]


def rows(count=1800, length=24, vocab=64):
    generator = torch.Generator().manual_seed(9)
    table = torch.softmax(3 * torch.randn(vocab, vocab, generator=generator), -1)
    ids = [torch.randint(vocab, (count,), generator=generator)]
    for _ in range(length - 1):
        ids.append(torch.multinomial(table[ids[-1]], 1, generator=generator)[:, 0])
    return [{"input_ids": row, "labels": row} for row in torch.stack(ids, 1)]


torch.manual_seed(0)
config = Qwen2Config(
    vocab_size=64, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=32, rms_norm_eps=NORM_EPS,
)  # fmt: skip
model = Qwen2ForCausalLM(config)
if not PLAIN:
    ottava.convert(model, "rowwise")
arguments = TrainingArguments(
    "out_qwen", per_device_train_batch_size=16, max_steps=100, learning_rate=3e-3, warmup_steps=10, logging_steps=1,
    save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
)  # fmt: skip
trainer = Trainer(model, arguments, train_dataset=rows())
trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"loss {sum(losses[-10:]) / 10:.4f}")
