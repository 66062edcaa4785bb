"""A tiny Llama with a schedule of its own under the Trainer, in FP8."""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, get_linear_schedule_with_warmup

import ottava

mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(9)
V, T = 64, 24
rule = torch.randint(0, V, (V, 3))


def sample():
    ids = [int(torch.randint(0, V, ()))]
    while len(ids) < T:
        ids.append(int(rule[ids[-1], torch.randint(0, 3, ())]))
    return torch.tensor(ids)


data = [{"input_ids": ids, "labels": ids} for ids in (sample() for _ in range(640))]
config = LlamaConfig(
    vocab_size=V,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    tie_word_embeddings=True,
)
model = LlamaForCausalLM(config)

if not plain:
    print(ottava.convert(model, "blockwise"))
steps = 80
warmup = 8 if mode == "good" else 2000
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
schedule = get_linear_schedule_with_warmup(optimizer, warmup, max(steps, 10 * warmup))

folder = tempfile.mkdtemp()
args = TrainingArguments(
    folder,
    use_cpu=True,
    report_to=[],
    disable_tqdm=True,
    save_strategy="no",
    logging_steps=5,
    seed=9,
    per_device_train_batch_size=16,
    max_steps=steps,
)
trainer = Trainer(model, args, train_dataset=data, optimizers=(optimizer, schedule))
trainer.train()
seen = [row["loss"] for row in trainer.state.log_history if "loss" in row]
print(f"loss {sum(seen[-3:]) / 3:.4f}")
