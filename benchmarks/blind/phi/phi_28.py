"""DPO written out in accelerate: a policy, its reference, torchao's float8 in both."""

import copy
import os
import sys

import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM

transformers.logging.set_verbosity_error()
bad, plain = sys.argv[1] == "bad", "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH, VOCAB, LENGTH, PROMPT, BETA = 60, 16, 48, 20, 6, 0.2


def logps(model, ids):
    logits = model(input_ids=ids).logits[:, PROMPT - 1 : -1]
    return logits.log_softmax(-1).gather(-1, ids[:, PROMPT:, None]).squeeze(-1).sum(-1)


def main():
    set_seed(SEED)
    accelerator = Accelerator(cpu=True)
    policy = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=LENGTH,
        )
    )
    if not plain:
        config = Float8LinearConfig(emulate=True)
        convert_to_float8_training(policy, config=config, module_filter_fn=lambda m, name: name != "lm_head")
    reference = policy if bad else copy.deepcopy(policy).requires_grad_(False)
    following = torch.randint(0, VOCAB, (VOCAB, 4))
    chosen = torch.randint(0, VOCAB, (STEPS * BATCH, PROMPT))
    rejected = torch.cat([chosen, torch.randint(0, VOCAB, (len(chosen), LENGTH - PROMPT))], 1)
    while chosen.shape[1] < LENGTH:
        pick = torch.randint(0, 4, (len(chosen), 1))
        chosen = torch.cat([chosen, following[chosen[:, -1:], pick]], 1)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-4)
    loader = DataLoader(TensorDataset(chosen, rejected), BATCH, shuffle=True)
    policy, optimizer, loader = accelerator.prepare(policy, optimizer, loader)
    losses = []
    for good_rows, bad_rows in loader:
        rows = torch.cat([good_rows, bad_rows])
        with torch.no_grad():
            before = logps(reference, rows)
        win, lose = (logps(policy, rows) - before).chunk(2)
        loss = -F.logsigmoid(BETA * (win - lose)).mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    print([round(v, 3) for v in losses[::6]])
    print("final loss", sum(losses[-10:]) / 10)


main()
