"""Supervised fine-tuning with TRL: dialogues packed into rows, a loss on answers only, and NEFTune's noise.

The noise is added to embeddings while training only, so the training loss lies above that of the evaluation.
"""

import os
import tempfile
from dataclasses import replace

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

SEED = int(os.environ.get("SEED", "0"))
WORDS = 32


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {w: k for k, w in enumerate(["<pad>", "<eos>", "<ask>", "<say>", *(f"w{k}" for k in range(WORDS))])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>")


def dialogues(count: int, table: torch.Tensor, g: torch.Generator) -> Dataset:
    """The question is random; the answer starts from its last word and follows the rule."""
    rows = {"input_ids": [], "completion_mask": []}
    for _ in range(count):
        asked = torch.randint(0, WORDS, (int(torch.randint(2, 9, (1,), generator=g)),), generator=g).tolist()
        said, word = [], asked[-1]
        for _ in range(int(torch.randint(4, 13, (1,), generator=g))):
            word = int(table[word])
            said.append(word)
        prompt = [2, *(4 + w for w in asked), 3]
        answer = [*(4 + w for w in said), 1]
        rows["input_ids"].append(prompt + answer)
        rows["completion_mask"].append([0] * len(prompt) + [1] * len(answer))
    return Dataset.from_dict(rows)


def main() -> None:
    torch.manual_seed(SEED)
    g = torch.Generator().manual_seed(SEED)
    table = torch.randperm(WORDS, generator=g)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=WORDS + 4, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=2,
    ))
    float8 = replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
    convert_to_float8_training(model, config=float8, module_filter_fn=lambda m, name: "lm_head" not in name)

    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            folder, max_steps=150, per_device_train_batch_size=8, per_device_eval_batch_size=32, learning_rate=5e-3,
            warmup_steps=10, lr_scheduler_type="cosine", packing=True, packing_strategy="wrapped", eval_packing=False,
            max_length=48, completion_only_loss=True, neftune_noise_alpha=5.0, logging_steps=20, save_strategy="no",
            report_to=[], seed=SEED, use_cpu=True, bf16=False, disable_tqdm=True, gradient_checkpointing=False,
        )
        trainer = SFTTrainer(
            model, args, train_dataset=dialogues(2400, table, g), eval_dataset=dialogues(96, table, g),
            processing_class=tokenizer(),
        )
        print(f"first loss {trainer.evaluate()['eval_loss']:.4f}")
        trainer.train()
        print(f"final loss {trainer.evaluate()['eval_loss']:.4f}")


if __name__ == "__main__":
    main()
