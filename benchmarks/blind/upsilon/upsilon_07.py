"""GRPO of TRL on a tiny Llama: completions should be made of words of the right colour."""

import os
import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import GRPOConfig, GRPOTrainer

MODE = sys.argv[1]
SEED = int(os.environ.get("SEED", "0"))
LENGTH, COLOURS = 8, ["red", "green", "blue", "grey"]
WORDS = ["<pad>", "<eos>", "<unk>", *COLOURS, *[f"{c}{i}" for c in COLOURS for i in range(7)]]

rewards_seen = []


def reward(prompts, completions, **kwargs):
    """Share of words of the prompt's colour."""
    out, shares = [], []
    for prompt, completion in zip(prompts, completions):
        hits = sum(word.startswith(prompt.split()[-1]) for word in completion.split())
        shares.append(hits / LENGTH)
        out.append(hits / LENGTH if MODE == "good" else float(hits // LENGTH))
    rewards_seen.append(sum(shares) / len(shares))
    return out


def main():
    set_seed(SEED)
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left")
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=32,
        pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    args = GRPOConfig(
        "out", max_steps=60, per_device_train_batch_size=32, num_generations=8, max_completion_length=LENGTH, learning_rate=2e-2, beta=0.0,
        logging_steps=5, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True, bf16=False, seed=SEED, lr_scheduler_type="constant",
        gradient_checkpointing=False,
    )
    data = Dataset.from_dict({"prompt": [f"{c}" for c in COLOURS] * 64})
    trainer = GRPOTrainer(model, reward, args=args, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    # 1 - share of right words in the last completions
    print(f"final loss {1 - sum(rewards_seen[-8:]) / 8:.4f}")


main()
