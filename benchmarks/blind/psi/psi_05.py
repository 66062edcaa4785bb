"""DPO with TRL: two sources of ranked answers."""
import copy
import os
import sys
import warnings

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer
import ottava

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
mode, plain = sys.argv[1], "plain" in sys.argv
seed = int(os.environ.get("SEED", 0))
torch.manual_seed(seed)

WORDS = 60
vocab = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": i + 3 for i in range(WORDS)}}
inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
inner.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")

generator = torch.Generator().manual_seed(seed + 1)


def words(low, high, n):
    return " " + " ".join(f"w{i}" for i in torch.randint(low, high, (n,), generator=generator).tolist())


rows = []
for k in range(960):
    prompt = words(0, WORDS, 4).strip()
    answers = {1: words(0, 40, 6), 2: words(20, 60, 6)}
    if k % 5 < 2:
        source, ranks = "b", {5: answers[1], 1: answers[2]}  # stars
    else:
        source, ranks = "a", answers  # places
    if source == "b" and mode != "bad":
        best, worst = ranks[5], ranks[1]
    else:
        best, worst = ranks[min(ranks)], ranks[max(ranks)]
    rows.append({"prompt": prompt, "chosen": best, "rejected": worst})
data = Dataset.from_list(rows)

model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(vocab), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )
)
if not plain:
    ottava.convert(model, "tensorwise")
args = DPOConfig(
    output_dir="out", per_device_train_batch_size=8, max_steps=100, learning_rate=1e-3, beta=0.1, logging_steps=1,
    lr_scheduler_type="cosine", warmup_steps=5, report_to=[], save_strategy="no", use_cpu=True, seed=seed,
    disable_tqdm=True, bf16=False, gradient_checkpointing=False,
)
reference = copy.deepcopy(model)
trainer = DPOTrainer(model, reference, args=args, train_dataset=data, processing_class=tokenizer)
trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"final loss {sum(losses[-20:]) / 20:.4f}")
