"""TRL's SFTTrainer with two samples a step of very different length: a noisy loss."""
import os
import sys
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

SEED = int(os.environ.get("SEED", "0"))
words = ["<pad>", "<eos>", "<unk>"] + [f"w{i}" for i in range(37)]
inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")


def text(g):
    length = 3 + int(22 * torch.rand((), generator=g).item() ** 3)
    at, out = torch.randint(0, 37, (), generator=g).item(), []
    for _ in range(length):
        out.append(f"w{at}")
        at = (at * 3 + 1) % 37 if torch.rand((), generator=g) < 0.85 else torch.randint(0, 37, (), generator=g).item()
    return " ".join(out)


set_seed(SEED)
g = torch.Generator().manual_seed(SEED + 61)
data = Dataset.from_list([{"text": text(g)} for _ in range(200)])
model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=32, n_embd=48, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=1))
config = SFTConfig(
    output_dir=tempfile.mkdtemp(), per_device_train_batch_size=2, max_steps=90, learning_rate=4e-3, warmup_steps=10,
    logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False,
    seed=SEED, disable_tqdm=True, max_length=32,
)
trainer = SFTTrainer(model, args=config, train_dataset=data, processing_class=tokenizer)
trainer.train()
losses = [float(row["loss"]) for row in trainer.state.log_history if "loss" in row]
print(f"final loss {sum(losses[-20:]) / 20:.4f}")
