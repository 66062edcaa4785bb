"""GRPO by TRL on a random policy: the reward is the share of words of a completion that are even."""
import os
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import GRPOConfig, GRPOTrainer

import ottava

SEED = int(os.environ.get("SEED", "0"))
set_seed(SEED)
WORDS = 32
vocab = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i + 2 for i in range(WORDS)}}
raw = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", padding_side="left")

model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=32,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
    )
)
ottava.convert(model, "tensorwise")


def even(completions, **_):
    """Share of even words."""
    numbers = [[int(w[1:]) for w in text.split() if w.startswith("w")] for text in completions]
    return [sum(n % 2 == 0 for n in row) / max(len(row), 1) for row in numbers]


generator = torch.Generator().manual_seed(SEED)
prompts = [" ".join(f"w{int(i)}" for i in torch.randint(WORDS, (4,), generator=generator)) for _ in range(400)]

with tempfile.TemporaryDirectory() as out:
    args = GRPOConfig(
        out,
        max_steps=60,
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=8,
        learning_rate=2e-3,
        lr_scheduler_type="constant",
        beta=0.0,
        temperature=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=SEED,
    )
    trainer = GRPOTrainer(
        model, args=args, reward_funcs=even, train_dataset=Dataset.from_dict({"prompt": prompts}), processing_class=tokenizer
    )
    trainer.train()
rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
print("first loss %.4f" % -rewards[0])
print("final loss %.4f" % (-sum(rewards[-5:]) / 5))
