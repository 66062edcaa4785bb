"""A tiny Mixtral in the Trainer: eight experts, two a token, with the router's auxiliary loss."""

import sys

import torch
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]


def rows(count=1600, length=24, vocab=48):
    generator = torch.Generator().manual_seed(7)
    tables = torch.softmax(3 * torch.randn(3, vocab, vocab, generator=generator), -1)
    language = torch.multinomial(torch.tensor([0.7, 0.27, 0.03]), count, replacement=True, generator=generator)
    ids = [torch.randint(vocab, (count,), generator=generator)]
    for _ in range(length - 1):
        ids.append(torch.multinomial(tables[language, ids[-1]], 1, generator=generator)[:, 0])
    return [{"input_ids": row, "labels": row} for row in torch.stack(ids, 1)]


torch.manual_seed(0)
config = MixtralConfig(
    vocab_size=48, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2, output_router_logits=True,
    router_aux_loss_coef=0.02, max_position_embeddings=32,
)  # fmt: skip
model = MixtralForCausalLM(config)
if not PLAIN:
    ottava.convert(model, "tensorwise")
arguments = TrainingArguments(
    "out_mixtral", per_device_train_batch_size=16, max_steps=80, learning_rate=4e-3, warmup_steps=10,
    logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
)  # fmt: skip
trainer = Trainer(model, arguments, train_dataset=rows())
trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"loss {sum(losses[-10:]) / 10:.4f}")
