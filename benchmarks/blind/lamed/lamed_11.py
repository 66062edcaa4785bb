"""LoRA with a high learning rate on a frozen random GPT-2, as a classifier of sequences, in the Trainer."""
import os
import sys
import tempfile

import torch
from peft import LoraConfig, TaskType, get_peft_model
from transformers import GPT2Config, GPT2ForSequenceClassification, Trainer, TrainingArguments

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH, LENGTH, VOCAB, CLASSES = 80, 8, 16, 40, 4


class Moods(torch.utils.data.Dataset):
    """A text's mood is the one that most of its words have; a tenth of the labels was guessed."""

    def __init__(self):
        mood = torch.randint(0, CLASSES, (VOCAB,))
        taste = torch.randn(STEPS * BATCH, CLASSES) * 1.5
        self.ids = torch.multinomial(torch.softmax(taste[:, mood], -1), LENGTH, replacement=True)
        self.label = nn_one_hot(mood[self.ids]).sum(1).argmax(-1)
        guessed = torch.rand(len(self.label)) < 0.1
        self.label[guessed] = torch.randint(0, CLASSES, (int(guessed.sum()),))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.label[i]}


def nn_one_hot(x):
    return torch.nn.functional.one_hot(x, CLASSES)


torch.manual_seed(SEED)
data = Moods()
base = GPT2ForSequenceClassification(GPT2Config(
    vocab_size=VOCAB, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, num_labels=CLASSES, pad_token_id=0,
    bos_token_id=0, eos_token_id=0, resid_pdrop=0.1, attn_pdrop=0.1,
))
model = get_peft_model(base, LoraConfig(
    r=8, lora_alpha=32, lora_dropout=0.1, target_modules=["c_attn", "c_fc"], modules_to_save=["score", "wte"],
    task_type=TaskType.SEQ_CLS, fan_in_fan_out=True,
))
if not PLAIN:
    ottava.convert(model, "rowwise")
with tempfile.TemporaryDirectory() as out:
    args = TrainingArguments(
        out, max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=1e-2, warmup_steps=5, logging_steps=1,
        report_to=[], save_strategy="no", use_cpu=True, seed=SEED, disable_tqdm=True,
    )
    trainer = Trainer(model, args, train_dataset=data)
    trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"final loss {sum(losses[-20:]) / 20:.4f}")
