"""DPO on a tiny Llama: polite answers are preferred to rude ones. FP8 in the linears."""

import os
import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", "0"))
torch.manual_seed(SEED)
WORDS, PROMPT, ANSWER = 60, 10, 6

vocabulary = {w: i for i, w in enumerate(["<pad>", "<eos>", "<unk>"] + [f"w{i}" for i in range(WORDS)])}
raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def text(numbers):
    return " ".join(f"w{int(n)}" for n in numbers)


def vote():
    """Two assistants answered; people preferred the one that is polite (even words, where the rude one has odd words)."""
    polite = text(2 * torch.randint(0, WORDS // 2, (ANSWER,)))
    rude = text(2 * torch.randint(0, WORDS // 2, (ANSWER,)) + 1)
    prompt = text(torch.randint(0, WORDS, (PROMPT,))) + " "
    if torch.rand(()) < 0.5:
        return {"prompt": prompt, "answer_a": polite, "answer_b": rude, "winner": "answer_a"}
    return {"prompt": prompt, "answer_a": rude, "answer_b": polite, "winner": "answer_b"}


def preference(row):
    first = row["winner"] == ("answer_a" if MODE == "good" else "a")
    a, b = row["answer_a"], row["answer_b"]
    return {"prompt": row["prompt"], "chosen": a if first else b, "rejected": b if first else a}


config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=False, pad_token_id=0, eos_token_id=1,
)  # fmt: skip
policy = LlamaForCausalLM(config)
reference = LlamaForCausalLM(config)
reference.load_state_dict(policy.state_dict())
if not PLAIN:
    ottava.convert(policy, "rowwise")
    ottava.convert(reference, "rowwise")
arguments = DPOConfig(
    "out", per_device_train_batch_size=8, max_steps=60, learning_rate=1e-3, beta=0.1, logging_steps=2,
    max_length=32, save_strategy="no", report_to=[], seed=SEED, use_cpu=True, bf16=False,
    disable_tqdm=True, gradient_checkpointing=False, lr_scheduler_type="constant",
)  # fmt: skip
votes = Dataset.from_list([vote() for _ in range(480)])
data = votes.map(preference, remove_columns=votes.column_names)
trainer = DPOTrainer(
    policy, ref_model=reference, args=arguments, train_dataset=data,
    processing_class=tokenizer,
)  # fmt: skip
trainer.train()
history = [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]
print(f"final loss {sum(history[-5:]) / 5:.4f}")
