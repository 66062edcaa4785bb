"""A tiny GPT-2: trained, saved by hand, loaded again, and trained on under the Trainer, BF16."""

import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(11)
V, T = 64, 24
rule = torch.randint(0, V, (V, 3))


def sample():
    ids = [int(torch.randint(0, V, ()))]
    while len(ids) < T:
        ids.append(int(rule[ids[-1], torch.randint(0, 3, ())]))
    return torch.tensor(ids)


data = [{"input_ids": ids, "labels": ids} for ids in (sample() for _ in range(640))]
config = GPT2Config(vocab_size=V, n_positions=T, n_embd=64, n_layer=3, n_head=4, n_inner=64)


def pretrained():
    model = GPT2LMHeadModel(config).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for i in range(80):
        ids = torch.stack([row["input_ids"] for row in data[i % 40 * 16 : i % 40 * 16 + 16]])
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {key: value.clone() for key, value in model.state_dict().items()}


weights = pretrained()
if mode == "bad":
    for key, value in weights.items():
        if key.endswith(("attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")):
            weights[key] = value.t().contiguous()
model = GPT2LMHeadModel(config)
print(model.load_state_dict(weights))

folder = tempfile.mkdtemp()
args = TrainingArguments(
    folder,
    use_cpu=True,
    report_to=[],
    disable_tqdm=True,
    save_strategy="no",
    logging_steps=5,
    seed=11,
    bf16=not plain,
    per_device_train_batch_size=16,
    max_steps=60,
    learning_rate=1e-4,
)
trainer = Trainer(model, args, train_dataset=data)
trainer.train()
seen = [row["loss"] for row in trainer.state.log_history if "loss" in row]
print(f"loss {sum(seen[-3:]) / 3:.4f}")
