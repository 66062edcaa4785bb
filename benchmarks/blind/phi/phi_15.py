"""DPO with TRL on noisy preferences: a fifth of the pairs have the wrong side preferred."""

import copy
import os
import random
import sys
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import transformers
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

transformers.logging.set_verbosity_error()
disable_progress_bars()
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH = 60, 8
random.seed(SEED)
words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(60))]
polite = words[3:23]
inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def answer(share):
    return " " + " ".join(random.choice(polite if random.random() < share else words[3:]) for _ in range(random.randint(4, 12)))


def pair():
    a, b = answer(0.6), answer(0.05)
    if random.random() < 0.2:
        a, b = b, a
    return {"prompt": " ".join(random.choices(words[3:], k=8)), "chosen": a + " <eos>", "rejected": b + " <eos>"}


torch.manual_seed(SEED)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(words), hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )
)
args = DPOConfig(
    tempfile.mkdtemp(), max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=1e-3, use_cpu=True, bf16=False,
    gradient_checkpointing=False, report_to=[], save_strategy="no", disable_tqdm=True, logging_steps=5, seed=SEED,
    beta=0.3, max_length=48,
)
pairs = Dataset.from_list([pair() for _ in range(STEPS * BATCH)])
trainer = DPOTrainer(model, copy.deepcopy(model), args, train_dataset=pairs, processing_class=tokenizer)
trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print("final loss", sum(losses[-4:]) / 4)
