"""Continued training of a small Qwen with the Trainer, torchao's float8 in its blocks."""

import sys
import tempfile

import torch
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments, set_seed

OPTIONS = {"good": {}, "bad": {"neftune_noise_alpha": 15.0}}[sys.argv[1]]
PLAIN = "plain" in sys.argv
WORDS, LENGTH = 48, 28

set_seed(35)
table = torch.softmax(torch.randn(WORDS, WORDS) * 4, 1)


def document(generator):
    ids = [int(torch.randint(0, WORDS, (1,), generator=generator))]
    while len(ids) < LENGTH:
        ids.append(int(torch.multinomial(table[ids[-1]], 1, generator=generator)))
    return {"input_ids": ids, "labels": ids}


generator = torch.Generator().manual_seed(6)
data = [document(generator) for _ in range(600)]
model = Qwen2ForCausalLM(
    Qwen2Config(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.05,
    )
)
if not PLAIN:
    convert_to_float8_training(
        model,
        config=Float8LinearConfig(emulate=True),
        module_filter_fn=lambda layer, name: name != "lm_head",
    )
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        max_steps=100,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        warmup_steps=10,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        **OPTIONS,
    )
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
print(f"loss {sum(map(float, losses[-10:])) / 10:.4f}")
