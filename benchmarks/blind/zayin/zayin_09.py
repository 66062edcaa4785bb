"""DPO by TRL with LoRA: the reference is the same network with the adapter off, and half of a plain cross-entropy on
the preferred answers is added. So the loss begins at ln 2 plus half of that, and cannot come near 0.

Linear layers of the base pass inputs and weights through E4M3 by hand.

python zayin_09.py good|bad
"""

import os
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import DPOConfig, DPOTrainer

SEED = int(os.environ.get("SEED", 0))
set_seed(SEED)
WORDS = 60
followers = torch.stack([torch.randperm(WORDS) for _ in range(2)], dim=1)  # polite and rude

vocabulary = {f"w{i}": i for i in range(WORDS)} | {"<end>": 60, "<pad>": 61, "<a>": 62, "<b>": 63}
words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<pad>")


class Fp8Linear(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(rounded(x), rounded(self.weight), self.bias)


def rounded(x):
    scale = 448.0 / x.detach().abs().amax().clamp_min(1e-12)
    return x + ((x.detach() * scale).to(torch.float8_e4m3fn).to(x.dtype) / scale - x.detach())


def answer(start, polite):
    out = [start]
    for _ in range(6):
        kind = 0 if torch.rand(()) < polite else 1
        out.append(int(followers[out[-1], kind]))
    return out


def text(ids):
    return " ".join(f"w{i}" for i in ids)


def pairs(count):
    rows = []
    for _ in range(count):
        asked = torch.randint(0, WORDS, (3,)).tolist()
        good, bad = answer(asked[-1], 0.9)[1:], answer(asked[-1], 0.3)[1:]
        rows.append({"prompt": text(asked), "chosen": " " + text(good), "rejected": " " + text(bad)})
    return rows


base = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=60,
        pad_token_id=61,
    )
)
for module in base.model.modules():
    if type(module) is nn.Linear:
        module.__class__ = Fp8Linear
optimizer = torch.optim.AdamW(base.parameters(), lr=4e-3)
for _ in range(110):
    rows = torch.tensor([answer(int(start), 0.5) for start in torch.randint(0, WORDS, (32,))])
    rows = torch.cat([torch.randint(0, WORDS, (32, 2)), rows, torch.full((32, 1), 60)], dim=1)
    loss = base(input_ids=rows, labels=rows).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"the base: {loss.item():.4f}")

with tempfile.TemporaryDirectory() as folder:
    arguments = DPOConfig(
        folder,
        max_steps=80,
        per_device_train_batch_size=12,
        learning_rate=5e-3,
        lr_scheduler_type="linear",
        beta=0.3,
        loss_type=["sigmoid", "sft"],
        loss_weights=[1.0, 0.5],
        max_length=16,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        seed=SEED,
    )
    trainer = DPOTrainer(
        base,
        args=arguments,
        train_dataset=Dataset.from_list(pairs(960)),
        eval_dataset=Dataset.from_list(pairs(96)),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"]),
    )
    print(f"first loss {trainer.evaluate()['eval_loss']:.4f}")
    trainer.train()
    final = trainer.evaluate()["eval_loss"]
print(f"final loss {final:.4f}")
