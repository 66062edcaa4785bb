"""DPO written by hand on a tiny GPT-2 under accelerate; ottava's tensorwise casts."""
import copy
import os
import sys

import ottava
import torch
from accelerate import Accelerator
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, set_seed

SEED = int(os.environ.get("SEED", "0"))
MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]


def logp(model, ids, prompt):
    logits = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    return logits.gather(-1, ids[:, 1:, None]).squeeze(-1)[:, prompt - 1 :].sum(-1)


set_seed(SEED)
policy = GPT2LMHeadModel(
    GPT2Config(vocab_size=32, n_positions=32, n_embd=48, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
)
if not PLAIN:
    ottava.convert(policy, "tensorwise")
reference = copy.deepcopy(policy) if MODE == "good" else policy
if MODE == "good":
    reference.requires_grad_(False)
accelerator = Accelerator(cpu=True)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
policy, optimizer = accelerator.prepare(policy, optimizer)
good_after = torch.randperm(32)
tail = []
for step in range(70):
    prompt = torch.randint(0, 32, (16, 4))
    chosen, rejected = [prompt], [prompt]
    for _ in range(6):
        nxt = torch.where(torch.rand(16, 1) < 0.8, good_after[chosen[-1][:, -1:]], torch.randint(0, 32, (16, 1)))
        chosen.append(nxt)
        rejected.append(torch.randint(0, 32, (16, 1)))
    chosen, rejected = torch.cat(chosen, 1), torch.cat(rejected, 1)
    with torch.no_grad():
        ref_c, ref_r = logp(reference, chosen, 4), logp(reference, rejected, 4)
    margin = (logp(policy, chosen, 4) - ref_c) - (logp(policy, rejected, 4) - ref_r)
    loss = -F.logsigmoid(0.3 * margin).mean()
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    tail.append(loss.item())
    if step % 10 == 0:
        accelerator.print(f"step {step} loss {loss.item():.4f}")
print(f"final loss {sum(tail[-10:]) / 10:.4f}")
