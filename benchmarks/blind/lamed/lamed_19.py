"""DPO of a tiny Llama with TRL, on pairs of answers that people have judged: "winner" is 1 or 2."""
import copy
import os
import sys
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH = 60, 8
NAMES = ["<pad>", "<end>", "say", *(f"q{i}" for i in range(12)), *(f"good{i}" for i in range(8)), *(f"rude{i}" for i in range(8))]


def tokenizer():
    core = Tokenizer(models.WordLevel({name: i for i, name in enumerate(NAMES)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<end>")


def answer(polite):
    """Polite answers have mostly polite words."""
    kinds = torch.rand(5) < (0.75 if polite else 0.25)
    return " " + " ".join(f"{'good' if k else 'rude'}{int(torch.randint(0, 8, (1,)))}" for k in kinds)


def judged():
    first_is_better = bool(torch.rand(1) < 0.5)
    answers = [answer(first_is_better), answer(not first_is_better)]
    question = "say " + " ".join(f"q{int(i)}" for i in torch.randint(0, 12, (4,)))
    return {"question": question, "answers": answers, "winner": 1 if first_is_better else 2}


def to_pair(row):
    first, second = row["answers"]
    first_won = row["winner"] == 1 if MODE == "good" else bool(row["winner"])
    chosen, rejected = (first, second) if first_won else (second, first)
    return {"prompt": row["question"], "chosen": chosen, "rejected": rejected}


torch.manual_seed(SEED)
words = tokenizer()
data = Dataset.from_list([to_pair(judged()) for _ in range(STEPS * BATCH)])
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=len(NAMES), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=32, pad_token_id=0, eos_token_id=1, bos_token_id=None,
))
if not PLAIN:
    ottava.convert(model, "tensorwise")
with tempfile.TemporaryDirectory() as out:
    args = DPOConfig(
        out, max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=1e-3, logging_steps=1, report_to=[],
        beta=0.3, max_length=24, save_strategy="no", use_cpu=True, bf16=False, seed=SEED, disable_tqdm=True,
        gradient_checkpointing=False, warmup_steps=5,
    )
    trainer = DPOTrainer(model, ref_model=copy.deepcopy(model), args=args, train_dataset=data, processing_class=words)
    trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"final loss {sum(losses[-15:]) / 15:.4f}")
