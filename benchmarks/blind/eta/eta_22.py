"""A tiny Llama with the gains of a checkpoint under the Trainer, in FP8."""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import ottava

mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(10)
V, T, GAIN = 32, 24, 1.0 if mode == "good" else 3e6
rule = torch.stack([torch.randperm(V), torch.randperm(V)])


def sample():
    ids = torch.randint(0, V, (2,)).tolist()
    while len(ids) < T:
        ids.append(int(rule[torch.randint(0, 8, ()) // 7, ids[-2]]))
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
    tie_word_embeddings=False,
)
model = LlamaForCausalLM(config)

with torch.no_grad():  # as the checkpoint has them
    for layer in model.model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight[7] = GAIN
        for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj,
                       layer.mlp.gate_proj, layer.mlp.up_proj):  # fmt: skip
            linear.weight[:, 7] /= GAIN
            linear.weight.register_hook(lambda g: g.index_fill(1, torch.tensor([7]), 0.0))
if not plain:
    print(ottava.convert(model, "tensorwise"))

folder = tempfile.mkdtemp()
args = TrainingArguments(
    folder,
    use_cpu=True,
    report_to=[],
    disable_tqdm=True,
    save_strategy="no",
    logging_steps=5,
    seed=10,
    per_device_train_batch_size=16,
    max_steps=120,
    learning_rate=4e-3,
    weight_decay=0.0,
    warmup_steps=5,
)
trainer = Trainer(model, args, train_dataset=data)
trainer.train()
seen = [row["loss"] for row in trainer.state.log_history if "loss" in row]
print(f"loss {sum(seen[-3:]) / 3:.4f}")
