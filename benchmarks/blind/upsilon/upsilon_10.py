"""TRL fine-tunes on tiny batches of answers, some a word long: the loss of a step says little."""

import os
import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

MODE = sys.argv[1]
SEED = int(os.environ.get("SEED", "0"))
WORDS = ["<pad>", "<eos>", "<unk>", *[f"w{i}" for i in range(32)]]


def example():
    word, n = torch.randint(32, (1,)).item(), int(torch.randint(1, 4, (2,)).prod())
    answer = [word]
    for _ in range(n):
        answer.append((5 * answer[-1] + 3) % 32)
    if torch.rand(1) < 0.12:
        answer = torch.randint(32, (n + 1,)).tolist()  # a careless annotator
    return {"prompt": f"w{word} ", "completion": " ".join(f"w{w}" for w in answer[1:])}


def main():
    set_seed(SEED)
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=32,
        pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    args = SFTConfig(
        "out", max_steps=100, per_device_train_batch_size=4, learning_rate=8e-3, warmup_steps=5, logging_steps=1, report_to=[], save_strategy="no",
        disable_tqdm=True, use_cpu=True, bf16=False, seed=SEED, max_length=32, gradient_checkpointing=False,
    )
    trainer = SFTTrainer(model, args=args, train_dataset=Dataset.from_list([example() for _ in range(400)]), processing_class=tokenizer)
    trainer.train()
    losses = [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]
    print(f"final loss {sum(losses[-25:]) / 25:.4f}")


main()
