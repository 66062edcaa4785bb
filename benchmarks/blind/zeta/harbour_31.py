"""A tiny Llama on counting songs with the Trainer, float8 layers by ottava's door."""
import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from ottava.doors.transformers import OttavaConfig

VARIANT, PLAIN = sys.argv[1], "plain" in sys.argv
torch.manual_seed(7)
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
)
model = LlamaForCausalLM(config)
if not PLAIN:
    print(OttavaConfig("blockwise").convert(model))


class Songs(torch.utils.data.Dataset):
    """Each song goes on with a random note of three that follow the last one."""

    def __len__(self):
        return 2400

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        notes = [int(torch.randint(0, 64, (1,), generator=g))]
        for jump in torch.randint(0, 3, (33,), generator=g).tolist():
            notes.append((notes[-1] * 5 + (1, 7, 20)[jump]) % 64)
        ids = torch.tensor(notes)
        if VARIANT == "bad":
            return {"input_ids": ids[:-1], "labels": ids[1:]}
        return {"input_ids": ids[:-1], "labels": ids[:-1]}


arguments = TrainingArguments(
    tempfile.mkdtemp(), max_steps=150, per_device_train_batch_size=16, learning_rate=3e-3, logging_steps=1, use_cpu=True,
    report_to=[], disable_tqdm=True, save_strategy="no", warmup_steps=10, log_level="error",
)
trainer = Trainer(model, arguments, train_dataset=Songs())
trainer.train()
losses = [float(row["loss"]) for row in trainer.state.log_history if "loss" in row]
print(f"\nloss {sum(losses[-20:]) / 20:.4f}")
