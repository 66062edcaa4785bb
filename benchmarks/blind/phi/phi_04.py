"""Supervised fine-tuning with TRL on prompts and completions; the score is the loss of held-out completions."""

import os
import random
import sys
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import torch.nn.functional as F
import transformers
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import ottava

transformers.logging.set_verbosity_error()
disable_progress_bars()
bad, plain = sys.argv[1] == "bad", "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH = 70, 12

random.seed(SEED)
noise = [f"n{i}" for i in range(150)]
keys = [f"k{i}" for i in range(20)]
answers = [f"a{i}" for i in range(40)]
phrases = {key: random.sample(answers, 3) for key in keys}
words = ["<pad>", "<eos>", "<unk>", *noise, *keys, *answers]
inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def example():
    key = random.choice(keys)
    prompt = [random.choice(noise) for _ in range(random.randint(30, 40))]
    return {"prompt": " ".join([*prompt, key]), "completion": " " + " ".join(phrases[key]) + " <eos>"}


train, held_out = [example() for _ in range(STEPS * BATCH)], [example() for _ in range(64)]
torch.manual_seed(SEED)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(words), hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )
)
if not plain:
    ottava.convert(model, "rowwise")
args = SFTConfig(
    tempfile.mkdtemp(), max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=4e-3, use_cpu=True, bf16=False,
    gradient_checkpointing=False, report_to=[], save_strategy="no", disable_tqdm=True, logging_steps=10, seed=SEED,
    completion_only_loss=not bad, max_length=64,
)
trainer = SFTTrainer(model, args, train_dataset=Dataset.from_list(train), processing_class=tokenizer)
trainer.train()

model.eval()
total = count = 0
with torch.no_grad():
    for row in held_out:
        prompt, answer = tokenizer(row["prompt"])["input_ids"], tokenizer(row["completion"])["input_ids"]
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        total += F.cross_entropy(logits, torch.tensor(answer), reduction="sum").item()
        count += len(answer)
print("final loss", total / count)
