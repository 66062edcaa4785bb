"""A tiny Llama with cosine restarts in the Trainer."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]


def chain(count=2400, length=24, vocab=64):
    generator = torch.Generator().manual_seed(3)
    table = torch.softmax(2.5 * torch.randn(vocab, vocab, generator=generator), -1)
    ids = [torch.randint(vocab, (count,), generator=generator)]
    for _ in range(length - 1):
        ids.append(torch.multinomial(table[ids[-1]], 1, generator=generator)[:, 0])
    return [{"input_ids": row, "labels": row} for row in torch.stack(ids, 1)]


torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=32,
)  # fmt: skip
model = LlamaForCausalLM(config)
if not PLAIN:
    ottava.convert(model, "blockwise")
arguments = TrainingArguments(
    "out_restarts", per_device_train_batch_size=16, max_steps=120, learning_rate=1e-2, warmup_steps=4,
    lr_scheduler_type="cosine_with_restarts", lr_scheduler_kwargs={"num_cycles": 4}, logging_steps=1,
    save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
)  # fmt: skip
trainer = Trainer(model, arguments, train_dataset=chain())
trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"loss {sum(losses[-10:]) / 10:.4f}")
