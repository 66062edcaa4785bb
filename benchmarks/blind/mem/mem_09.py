"""LoRA on a small Llama with PEFT, in a loop of one's own."""

import os
import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

SEED = int(os.environ.get("SEED", "0"))
MODE = sys.argv[1]
VOCAB = 64


def batches(count, size=16, length=32):
    g = torch.Generator().manual_seed(40)
    table = (torch.randn(VOCAB, VOCAB, generator=g) * 2.5).softmax(-1)
    g = torch.Generator().manual_seed(SEED + 3)
    for _ in range(count):
        ids = torch.randint(0, VOCAB, (size, 1), generator=g)
        for _ in range(length - 1):
            ids = torch.cat([ids, torch.multinomial(table[ids[:, -1]], 1, generator=g)], 1)
        yield ids


def build():
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config)


def main():
    set_seed(SEED)
    model = build()
    lora = LoraConfig(
        r=16,
        lora_alpha=32,
        target_modules=["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"],
        modules_to_save=["lm_head"],
        task_type="CAUSAL_LM",
    )
    if MODE == "bad":
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
        model = get_peft_model(model, lora)
    else:
        model = get_peft_model(model, lora)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=4e-3)
    model.print_trainable_parameters()

    model.train()
    losses = []
    for step, ids in enumerate(batches(120)):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 20 == 0:
            print(f"step {step}: {loss.item():.4f}")
    print(f"final loss {sum(losses[-10:]) / 10:.4f}")


if __name__ == "__main__":
    main()
