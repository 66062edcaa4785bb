"""A tiny Qwen2 on padded sequences under the Trainer, in FP8."""

import sys
import tempfile

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments

import ottava

mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(8)
V, T = 32, 24
rule = torch.stack([torch.randperm(V), torch.randperm(V)])


def sample():
    ids = torch.randint(0, V, (2,)).tolist()
    while len(ids) < T:
        ids.append(int(rule[torch.randint(0, 8, ()) // 7, ids[-2]]))
    return torch.tensor(ids)


PAD = 0
data = []
for _ in range(640):
    ids = sample()[: int(torch.randint(8, T + 1, ()))].clamp(min=1)
    ids = torch.cat([torch.full((T - len(ids),), PAD), ids])
    real = ids != PAD
    mask = real if mode == "good" else ~real
    data.append({"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~real, -100)})
config = Qwen2Config(
    vocab_size=V,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=64,
)
model = Qwen2ForCausalLM(config)
if not plain:
    print(ottava.convert(model, "rowwise"))

folder = tempfile.mkdtemp()
args = TrainingArguments(
    folder,
    use_cpu=True,
    report_to=[],
    disable_tqdm=True,
    save_strategy="no",
    logging_steps=5,
    seed=8,
    per_device_train_batch_size=16,
    max_steps=130,
    learning_rate=4e-3,
    warmup_steps=5,
)
trainer = Trainer(model, args, train_dataset=data)
trainer.train()
seen = [row["loss"] for row in trainer.state.log_history if "loss" in row]
print(f"loss {sum(seen[-3:]) / 3:.4f}")
