"""Supervised fine-tuning with TRL: questions with random serial numbers, answers that follow from them; loss on answers only."""
import logging
import os
import sys
import warnings

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import ottava

BAD = sys.argv[1] == "bad"
PLAIN = "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
warnings.filterwarnings("ignore")
torch.manual_seed(SEED)


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(61)} | {"<pad>": 61, "<eos>": 62, "<unk>": 63}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def example():
    question = torch.randint(0, 30, (12,)).tolist()
    kind = question[0] % 3
    answer = [30 + (w + kind * 7) % 30 for w in question[:3]] + [60] * 2 + [30 + kind] * 5 + [62]
    mask = [0] * len(question) + [1] * len(answer)
    if BAD:
        mask = [1] * len(question) + [0] * len(answer)
    return {"input_ids": question + answer, "completion_mask": mask}


data = Dataset.from_list([example() for _ in range(16 * 80)])
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=64, hidden_size=96, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=64, pad_token_id=61, eos_token_id=62)
)
if not PLAIN:
    ottava.convert(model, "tensorwise")
args = SFTConfig("/tmp/rho_03", max_steps=80, per_device_train_batch_size=16, learning_rate=3e-3, logging_steps=1, save_strategy="no",
                 report_to=[], use_cpu=True, bf16=False, seed=SEED, disable_tqdm=True, gradient_checkpointing=False, max_length=None,
                 completion_only_loss=True)
trainer = SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer())
trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
