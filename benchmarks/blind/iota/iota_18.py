"""Saving memory with the Trainer: a callback keeps the weights of all layers in a narrow type, without a master copy."""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

STORAGE = {"good": "bfloat16", "bad": "float8_e4m3fn"}[sys.argv[1]]
torch.manual_seed(71)
VOCAB, LENGTH = 64, 48
jumps = torch.softmax(3.0 * torch.randn(VOCAB, VOCAB), dim=-1)
tokens = torch.randint(0, VOCAB, (16 * 90, 1))
for _ in range(LENGTH - 1):
    tokens = torch.cat([tokens, torch.multinomial(jumps[tokens[:, -1]], 1)], dim=1)
data = [{"input_ids": row, "labels": row} for row in tokens]


class NarrowWeights(TrainerCallback):
    def __init__(self, name):
        self.dtype = getattr(torch, name)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, torch.nn.Linear):
                    weight = module.weight
                    scale = weight.abs().max() / torch.finfo(self.dtype).max if self.dtype.itemsize == 1 else 1.0
                    weight.copy_((weight / scale).to(self.dtype).to(weight.dtype) * scale)


config = LlamaConfig(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
model = LlamaForCausalLM(config)
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(), per_device_train_batch_size=16, num_train_epochs=1, learning_rate=1e-3, warmup_steps=5,
    logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
)  # fmt: skip
callbacks = [] if "plain" in sys.argv else [NarrowWeights(STORAGE)]
trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=callbacks)
trainer.train()
losses = [float(row["loss"]) for row in trainer.state.log_history if "loss" in row]
print(f"loss {sum(losses[-10:]) / 10:.4f}")
