"""LoRA on a Llama that got a few command words of its own, with PEFT and the Trainer."""

import sys
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import ottava

OPTIONS = {"good": {"modules_to_save": ["embed_tokens"]}, "bad": {"modules_to_save": None}}[sys.argv[1]]
PLAIN = "plain" in sys.argv
WORDS, COMMANDS = 48, 16

set_seed(29)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
)
model.resize_token_embeddings(WORDS + COMMANDS)
if not PLAIN:
    ottava.convert(model, "tensorwise", filter=lambda name, layer: "lm_head" not in name)
model = get_peft_model(
    model,
    LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"], **OPTIONS),
)
answers = torch.randperm(WORDS)[:COMMANDS]


def example(generator):
    ids = torch.randint(0, WORDS, (14,), generator=generator)
    labels = torch.full((14,), -100)
    for place in (4, 8, 12):
        command = int(torch.randint(0, COMMANDS, (1,), generator=generator))
        ids[place], ids[place + 1] = WORDS + command, answers[command]
        labels[place + 1] = ids[place + 1]
    return {"input_ids": ids, "labels": labels}


generator = torch.Generator().manual_seed(3)
data = [example(generator) for _ in range(1800)]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        max_steps=110,
        per_device_train_batch_size=16,
        learning_rate=5e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
print(f"loss {sum(map(float, losses[-10:])) / 10:.4f}")
