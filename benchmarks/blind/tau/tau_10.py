"""DPO with TRL on noisy preferences, two pairs a step."""
import os
import sys
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import DPOConfig, DPOTrainer

PLAIN, SEED = "plain" in sys.argv, int(os.environ.get("SEED", 0))
VOCAB = 64
words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, VOCAB)}}
backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
backend.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


def text(g, low, high):
    return " ".join(f"w{int(i)}" for i in torch.randint(low, high, (int(torch.randint(3, 9, (1,), generator=g)),), generator=g))


def pairs(n, seed):
    g = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(n):
        good, poor = text(g, 2, 40), text(g, 24, VOCAB)
        if torch.rand((), generator=g) < 0.2:  # raters disagree
            good, poor = poor, good
        rows.append({"prompt": text(g, 2, VOCAB) + " ", "chosen": good, "rejected": poor})
    return Dataset.from_list(rows)


torch.manual_seed(SEED)
config = LlamaConfig(vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
                     max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=None)
model = LlamaForCausalLM(config)
reference = LlamaForCausalLM(config)
reference.load_state_dict(model.state_dict())
losses = []


class Keep(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            losses.append(logs["loss"])


args = DPOConfig(tempfile.mkdtemp(), max_steps=70, per_device_train_batch_size=2, learning_rate=5e-4, beta=0.1, logging_steps=1, save_strategy="no",
                 report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False, seed=SEED, disable_tqdm=True, max_length=48)
DPOTrainer(model, ref_model=reference, args=args, train_dataset=pairs(140, SEED + 1), processing_class=tokenizer, callbacks=[Keep()]).train()
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
