"""A tiny Llama under the Trainer, BF16."""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(7)
V, T = 64, 24
rule = torch.randint(0, V, (V, 3))


def sample():
    ids = [int(torch.randint(0, V, ()))]
    while len(ids) < T:
        ids.append(int(rule[ids[-1], torch.randint(0, 3, ())]))
    return torch.tensor(ids)


rows = [sample() for _ in range(640)]
data = []
for ids in rows:
    labels = ids.clone()
    if mode == "bad":
        labels = torch.cat([ids[1:], torch.tensor([-100])])
    data.append({"input_ids": ids, "labels": labels})
config = LlamaConfig(
    vocab_size=V,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
model = LlamaForCausalLM(config)

folder = tempfile.mkdtemp()
args = TrainingArguments(
    folder,
    use_cpu=True,
    report_to=[],
    disable_tqdm=True,
    save_strategy="no",
    logging_steps=5,
    seed=7,
    bf16=not plain,
    per_device_train_batch_size=16,
    max_steps=90,
    learning_rate=4e-3,
    warmup_steps=5,
)
trainer = Trainer(model, args, train_dataset=data)
trainer.train()
seen = [row["loss"] for row in trainer.state.log_history if "loss" in row]
print(f"loss {sum(seen[-3:]) / 3:.4f}")
