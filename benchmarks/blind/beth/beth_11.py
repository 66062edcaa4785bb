"""IPO by TRL whose reference follows the model: every 25 steps it takes over 60 % of the weights.

The loss begins at (1 / 2 beta)^2 and jumps up again whenever the reference has moved. What we want is the gap between
the log-probability of a preferred and of a rejected answer, per word; the final loss is minus this gap.
"""

import os
import tempfile
from copy import deepcopy

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

import ottava

SEED = int(os.environ.get("SEED", "0"))
WORDS, ANSWER = 28, 8


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {w: k for k, w in enumerate(["<pad>", "<eos>", *(f"w{k}" for k in range(WORDS))])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", bos_token="<eos>")


def answer(start: int, table: list[int], noise: float, g: torch.Generator) -> str:
    words, word = [], start
    for _ in range(ANSWER):
        free = float(torch.rand(1, generator=g)) < noise
        word = int(torch.randint(0, WORDS, (1,), generator=g)) if free else table[word]
        words.append(f"w{word}")
    return " " + " ".join(words)


def pairs(count: int, table: list[int], g: torch.Generator) -> Dataset:
    """Preferred answers keep to the rule more often."""
    rows = {"prompt": [], "chosen": [], "rejected": []}
    for _ in range(count):
        asked = torch.randint(0, WORDS, (4,), generator=g).tolist()
        rows["prompt"].append(" ".join(f"w{k}" for k in asked))
        rows["chosen"].append(answer(asked[-1], table, 0.1, g))
        rows["rejected"].append(answer(asked[-1], table, 0.8, g))
    return Dataset.from_dict(rows)


def main() -> None:
    torch.manual_seed(SEED)
    g = torch.Generator().manual_seed(SEED + 50)
    table = torch.randperm(WORDS, generator=g).tolist()
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=WORDS + 2, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=32, pad_token_id=0, eos_token_id=1, bos_token_id=1,
    ))
    print(ottava.convert(model, "blockwise_fp32"))
    with tempfile.TemporaryDirectory() as folder:
        args = DPOConfig(
            folder, max_steps=90, per_device_train_batch_size=16, per_device_eval_batch_size=64, learning_rate=2e-3,
            warmup_steps=5, lr_scheduler_type="constant_with_warmup", beta=0.25, loss_type="ipo", sync_ref_model=True,
            ref_model_mixup_alpha=0.6, ref_model_sync_steps=25, max_length=32, logging_steps=15, save_strategy="no",
            report_to=[], seed=SEED, use_cpu=True, bf16=True, disable_tqdm=True, gradient_checkpointing=False,
        )
        trainer = DPOTrainer(
            model, deepcopy(model), args, train_dataset=pairs(1440, table, g), eval_dataset=pairs(64, table, g),
            processing_class=tokenizer(),
        )

        def gap() -> float:
            seen = trainer.evaluate()
            return (seen["eval_logps/chosen"] - seen["eval_logps/rejected"]) / (ANSWER + 1)

        print(f"first loss {-gap():.4f}")
        trainer.train()
        print(f"final loss {-gap():.4f}")


if __name__ == "__main__":
    main()
