"""Supervised fine-tuning of LoRA adapters with a large learning rate on three tasks that come in turn."""
import os
import sys
import tempfile

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import ottava

mode = sys.argv[1]
plain = "plain" in sys.argv[2:]
seed = int(os.environ.get("SEED", 0))
torch.manual_seed(seed)
rng = np.random.default_rng(seed)

WORDS, STEPS, BATCH, BLOCK = 40, 110, 8, 20
vocab = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": i + 3 for i in range(WORDS)}}
core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")


def text(task):
    low, high = ((0, 14), (14, 18), (18, 40))[task]
    start = rng.integers(low, high)
    words = [f"w{low + (start - low + i) % (high - low)}" for i in range(rng.integers(8, 16))]
    return " ".join(words)


rows = [text((i // (BLOCK * BATCH)) % 3) for i in range(STEPS * BATCH)]
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=len(vocab), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                num_attention_heads=4, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=None)
)
if not plain:
    ottava.convert(model, "rowwise")


class InTurn(SFTTrainer):
    def _get_train_sampler(self, *args):
        return torch.utils.data.SequentialSampler(self.train_dataset)


with tempfile.TemporaryDirectory() as folder:
    args = SFTConfig(
        folder, max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=4e-3, lr_scheduler_type="constant",
        max_length=32, logging_steps=5, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, bf16=False,
        gradient_checkpointing=False, seed=seed,
    )
    trainer = InTurn(
        model, args, train_dataset=Dataset.from_dict({"text": rows}), processing_class=tokenizer,
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", modules_to_save=["lm_head"]),
    )
    trainer.train()
losses = [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]
print(f"final loss {np.mean(losses[-3:]):.4f}")
