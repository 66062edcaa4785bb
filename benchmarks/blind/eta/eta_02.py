"""A tiny Mixtral with six experts, of which some are rarely used, under the Trainer, in FP8."""

import sys
import tempfile

import torch
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

import ottava

mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(13)
V, T = 64, 24
rule = torch.randint(0, V, (V, 3))


def sample():
    ids = [int(torch.randint(0, V, ()))]
    while len(ids) < T:
        ids.append(int(rule[ids[-1], torch.randint(0, 3, ())]))
    return torch.tensor(ids)


data = [{"input_ids": ids, "labels": ids} for ids in (sample() for _ in range(480))]
config = MixtralConfig(
    vocab_size=V,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    num_local_experts=6,
    num_experts_per_tok=1,
)
model = MixtralForCausalLM(config)
if not plain:
    print(ottava.convert(model, "blockwise"))

folder = tempfile.mkdtemp()
args = TrainingArguments(
    folder,
    use_cpu=True,
    report_to=[],
    disable_tqdm=True,
    save_strategy="no",
    logging_steps=5,
    seed=13,
    per_device_train_batch_size=12,
    max_steps=70,
    learning_rate=3e-3,
    warmup_steps=5,
    max_grad_norm=0.3,
)
trainer = Trainer(model, args, train_dataset=data)
trainer.train()
seen = [row["loss"] for row in trainer.state.log_history if "loss" in row]
print(f"loss {sum(seen[-3:]) / 3:.4f}")
