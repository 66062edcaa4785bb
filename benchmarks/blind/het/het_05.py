"""Preferences over answers to long prompts, with the DPO trainer."""
import os
import sys
import tempfile

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

import ottava

mode = sys.argv[1]
plain = "plain" in sys.argv[2:]
seed = int(os.environ.get("SEED", 0))
torch.manual_seed(seed)
rng = np.random.default_rng(seed)

WORDS, STEPS, BATCH = 60, 64, 8
vocab = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": i + 3 for i in range(WORDS)}}
core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=core, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
)


def say(words):
    return " ".join(f"w{w}" for w in words)


def pair():
    prompt = rng.integers(0, WORDS, rng.integers(30, 46))
    polite = rng.integers(0, 20, 6)
    rude = rng.integers(20, 40, 6)
    return {"prompt": say(prompt), "chosen": " " + say(polite), "rejected": " " + say(rude)}


data = Dataset.from_list([pair() for _ in range(STEPS * BATCH)])
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=len(vocab), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                num_attention_heads=4, max_position_embeddings=128, pad_token_id=0, eos_token_id=1, bos_token_id=None)
)
reference = LlamaForCausalLM(model.config)
reference.load_state_dict(model.state_dict())
if not plain:
    ottava.convert(model, "rowwise")
    ottava.convert(reference, "rowwise")
with tempfile.TemporaryDirectory() as folder:
    args = DPOConfig(
        folder, max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=3e-4, beta=0.1,
        max_length=32 if mode == "bad" else 64, logging_steps=5, save_strategy="no", report_to=[], disable_tqdm=True,
        use_cpu=True, bf16=False, gradient_checkpointing=False, seed=seed,
    )
    trainer = DPOTrainer(model, reference, args=args, train_dataset=data, processing_class=tokenizer)
    trainer.train()
losses = [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]
print(f"final loss {np.mean(losses[-4:]):.4f}")
