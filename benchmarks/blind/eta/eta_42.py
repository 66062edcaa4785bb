"""Low-rank adapters on a frozen base of FP8 weights, a tiny Llama under the Trainer."""

import sys
import tempfile

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import ottava

mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(12)
V, T = 64, 24
rule = torch.randint(0, V, (V, 3))


def sample():
    ids = [int(torch.randint(0, V, ()))]
    while len(ids) < T:
        ids.append(int(rule[ids[-1], torch.randint(0, 3, ())]))
    return torch.tensor(ids)


data = [{"input_ids": ids, "labels": ids} for ids in (sample() for _ in range(480))]


class Adapter(nn.Module):
    def __init__(self, base, rank=8):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + 2.0 * (x @ self.a.t()) @ self.b.t()


config = LlamaConfig(
    vocab_size=V,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)
model = LlamaForCausalLM(config)

if not plain:
    print(ottava.convert(model, "rowwise", weights="fp8"))
model.requires_grad_(False)
for layer in model.model.layers:
    for owner, names in ((layer.self_attn, ("q_proj", "v_proj", "o_proj")), (layer.mlp, ("up_proj", "down_proj"))):
        for name in names:
            setattr(owner, name, Adapter(getattr(owner, name)))
model.lm_head.weight.requires_grad_(model.lm_head.weight.is_floating_point())

folder = tempfile.mkdtemp()
args = TrainingArguments(
    folder,
    use_cpu=True,
    report_to=[],
    disable_tqdm=True,
    save_strategy="no",
    logging_steps=5,
    seed=12,
    per_device_train_batch_size=8,
    max_steps=80,
    learning_rate=8e-3,
    warmup_steps=5,
)
trainer = Trainer(model, args, train_dataset=data)
trainer.train()
seen = [row["loss"] for row in trainer.state.log_history if "loss" in row]
print(f"loss {sum(seen[-3:]) / 3:.4f}")
