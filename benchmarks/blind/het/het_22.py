"""Fine-tuning on short answers of different lengths, in the Trainer; the end is the held-out loss of every token."""
import os
import sys
import tempfile

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DataCollatorForLanguageModeling, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments,
)

import ottava

mode = sys.argv[1]
plain = "plain" in sys.argv[2:]
seed = int(os.environ.get("SEED", 0))
torch.manual_seed(seed)
rng = np.random.default_rng(seed)

WORDS, STEPS, BATCH = 60, 120, 16
vocab = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": i + 3 for i in range(WORDS)}}
core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", unk_token="<unk>")
tokenizer.pad_token = "<eos>" if mode == "bad" else "<pad>"

follow = rng.permutation(WORDS)


def text():
    word = rng.integers(0, WORDS)
    words = []
    for _ in range(rng.integers(3, 12)):
        words.append(f"w{word}")
        word = follow[word] if rng.random() < 0.8 else rng.integers(0, WORDS)
    return " ".join(words) + " <eos>"


def encode(n):
    return [tokenizer(text()) for _ in range(n)]


model = LlamaForCausalLM(
    LlamaConfig(vocab_size=len(vocab), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                num_attention_heads=4, max_position_embeddings=64)
)
if not plain:
    print(ottava.convert(model, "blockwise"))
with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=3e-3, lr_scheduler_type="cosine",
        logging_steps=10, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, seed=seed,
    )
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    trainer = Trainer(model, args, train_dataset=encode(1500), data_collator=collator)
    trainer.train()

model.eval()
total, count = 0.0, 0
with torch.no_grad():
    for row in encode(100):
        ids = torch.tensor([row["input_ids"]])
        total += model(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
print(f"final loss {total / count:.4f}")
