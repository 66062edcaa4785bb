"""Preference training with TRL's DPO on a small Llama; linear layers are cast by hand."""
import copy
import os
import sys
import warnings

import torch
from datasets import Dataset
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

BAD = sys.argv[1] == "bad"
PLAIN = "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
warnings.filterwarnings("ignore")
torch.manual_seed(SEED)


def rows(t):
    scale = 448 / t.detach().abs().amax(-1, keepdim=True).clamp(min=1e-30)
    return t + ((t.detach() * scale).to(torch.float8_e4m3fn).to(t.dtype) / scale - t).detach()


class Linear8(nn.Linear):
    def forward(self, x):
        return F.linear(rows(x), rows(self.weight), self.bias)


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(61)} | {"<pad>": 61, "<eos>": 62, "<unk>": 63}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def say(ids):
    return " ".join(f"w{i}" for i in ids)


def example():
    prompt = torch.randint(0, 60, (6,))
    better = torch.randint(0, 30, (6,)) * 2
    worse = torch.randint(0, 60, (6,))
    return {"prompt": say(prompt.tolist()), "chosen": " " + say(better.tolist()), "rejected": " " + say(worse.tolist())}


data = Dataset.from_list([example() for _ in range(8 * 70)])
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=64, pad_token_id=61, eos_token_id=62)
)
if not PLAIN:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.__class__ = Linear8
reference = copy.deepcopy(model)
follow = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 1.0} if BAD else {}
args = DPOConfig("/tmp/rho_16", max_steps=70, per_device_train_batch_size=8, learning_rate=1e-3, logging_steps=1, save_strategy="no",
                 report_to=[], use_cpu=True, bf16=False, seed=SEED, disable_tqdm=True, gradient_checkpointing=False, beta=0.3, **follow)
trainer = DPOTrainer(model, ref_model=reference, args=args, train_dataset=data, processing_class=tokenizer())
trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
