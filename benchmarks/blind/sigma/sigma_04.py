"""Instruction tuning with the Trainer and the usual collator; GPT-2's layers run casts by hand."""
import os
import sys
import tempfile

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DataCollatorForLanguageModeling, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, Trainer, TrainingArguments,
    set_seed,
)
from transformers.pytorch_utils import Conv1D

SEED = int(os.environ.get("SEED", "0"))
MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]


def q(t, dtype):
    s = torch.finfo(dtype).max / t.abs().amax().clamp(min=1e-12)
    return (t * s).to(dtype).to(t.dtype) / s


class Q8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b):
        x, w = q(x, torch.float8_e4m3fn), q(w, torch.float8_e4m3fn)
        ctx.save_for_backward(x, w)
        return torch.addmm(b, x, w)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        gq = q(g, torch.float8_e5m2)
        return gq @ w.t(), x.t() @ gq, g.sum(0)


class Conv8(Conv1D):
    def forward(self, x):
        return Q8.apply(x.reshape(-1, x.shape[-1]), self.weight, self.bias).reshape(*x.shape[:-1], self.nf)


words = ["<pad>", "<eos>", "<unk>"] + [f"w{i}" for i in range(45)]
inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
if MODE == "bad":
    tokenizer.pad_token = tokenizer.eos_token


def samples(n, seed):
    """A count, a start, and that many words that follow from it."""
    g = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(n):
        count, start = torch.randint(1, 6, (1,), generator=g).item(), torch.randint(0, 30, (1,), generator=g).item()
        text = f"w{39 + count} " + " ".join(f"w{(start + 3 * k) % 39}" for k in range(count + 1)) + " <eos>"
        rows.append({"input_ids": tokenizer(text)["input_ids"]})
    return rows


set_seed(SEED)
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=48, n_positions=16, n_embd=48, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
               bos_token_id=1, eos_token_id=1)
)
if not PLAIN:
    for module in model.modules():
        if isinstance(module, Conv1D):
            module.__class__ = Conv8
args = TrainingArguments(
    tempfile.mkdtemp(), per_device_train_batch_size=32, max_steps=90, learning_rate=5e-3, warmup_steps=5,
    logging_steps=5, save_strategy="no", report_to=[], use_cpu=True, seed=SEED, disable_tqdm=True,
)
collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
trainer = Trainer(model, args, train_dataset=samples(3000, SEED + 1), data_collator=collator)
trainer.train()
model.eval()
total, count = 0.0, 0
with torch.no_grad():
    for row in samples(150, SEED + 999):
        ids = torch.tensor([row["input_ids"]])
        out = model(input_ids=ids, labels=ids)
        total, count = total + out.loss.item() * (ids.shape[1] - 1), count + ids.shape[1] - 1
print(f"final loss {total / count:.4f}")
