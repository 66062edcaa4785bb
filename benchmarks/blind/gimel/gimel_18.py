"""SFT of a tiny Llama for nine passes over a small set of sentences, under mxfp8."""

import os
import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", "0"))
torch.manual_seed(SEED)

who = ["ana", "ben", "cleo", "dan", "eve", "finn", "gus", "hana", "ivo", "jo", "kim", "lea"]
does = ["sees", "sells", "paints", "finds", "mends", "counts", "hides", "moves"]
what = ["a boat", "the lamp", "two pears", "a red door", "some bread", "the old clock", "a map", "nine stones"]
place = ["at home", "in town", "by the sea", "on a hill", "near the mill"]
words = sorted({w for group in (who, does, what, place) for text in group for w in text.split()})
vocabulary = {w: i for i, w in enumerate(["<pad>", "<eos>", "<unk>", "."] + words)}
raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def pick(group):
    return group[int(torch.randint(0, len(group), ()))]


def story():
    return " . ".join(f"{pick(who)} {pick(does)} {pick(what)} {pick(place)}" for _ in range(3)) + " ."


data = Dataset.from_dict({"text": [story() for _ in range(256)]})
config = LlamaConfig(
    vocab_size=64, hidden_size=96, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=False, pad_token_id=0, eos_token_id=1,
)  # fmt: skip
model = LlamaForCausalLM(config)
if not PLAIN:
    ottava.convert(model, "mxfp8")
arguments = SFTConfig(
    "out", per_device_train_batch_size=16, num_train_epochs=9, learning_rate=6e-3, lr_scheduler_type="constant",
    logging_steps=1, save_strategy="no", report_to=[], seed=SEED, use_cpu=True, bf16=False, disable_tqdm=True,
    max_length=48, gradient_checkpointing=False,
)  # fmt: skip
trainer = SFTTrainer(model, args=arguments, train_dataset=data, processing_class=tokenizer)
trainer.train()
history = [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]
print(f"final loss {sum(history[-16:]) / 16:.4f}")
