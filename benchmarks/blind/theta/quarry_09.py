"""LoRA by PEFT on a model that was trained before; the base weights are rounded to E4M3 once and frozen."""
import sys
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


PLAIN = "plain" in sys.argv[2:]

torch.manual_seed(52)
vocab = 96
config = LlamaConfig(vocab_size=vocab, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64)
model = LlamaForCausalLM(config)


def walk(rows, length):
    """A word depends on the two before it; some words are noise."""
    table = torch.randint(vocab, (vocab, vocab))
    out = [torch.randint(vocab, (rows,)), torch.randint(vocab, (rows,))]
    for _ in range(length - 2):
        follow = table[out[-2] // 24, out[-1] // 6]
        out.append(torch.where(torch.rand(rows) < 0.1, torch.randint(vocab, (rows,)), follow))
    return torch.stack(out, 1)


old, new = walk(1000, 24), walk(600, 24)
warm = torch.optim.AdamW(model.parameters(), lr=4e-3)
for at in range(0, 960, 16):
    loss = model(input_ids=old[at : at + 16], labels=old[at : at + 16]).loss
    warm.zero_grad()
    loss.backward()
    warm.step()
if not PLAIN:
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "proj" in name:
                scale = 448.0 / p.abs().amax(-1, keepdim=True)
                p.copy_((p * scale).to(torch.float8_e4m3fn).float() / scale)
model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", modules_to_save=["lm_head"]))
data = [{"input_ids": row, "labels": row} for row in new]
args = TrainingArguments(
    tempfile.mkdtemp(), use_cpu=True, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True, seed=0,
    max_steps=80, per_device_train_batch_size=8, learning_rate=4e-3,
)
trainer = Trainer(model, args, train_dataset=data)
trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"first {losses[0]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")
