"""AdaLoRA by hand in a plain loop: adapters begin with rank 12, and between steps 20 and 70 most ranks are put to 0.

The base was trained on one domain and is frozen. The loss that is minimized has the orthogonality term of AdaLoRA in it.
"""

import os

import torch
from peft import AdaLoraConfig, TaskType, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import ottava

SEED = int(os.environ.get("SEED", "0"))
SYMBOLS, LENGTH, BATCH, ADAPT = 40, 24, 16, 110


def sample(table: torch.Tensor, count: int, g: torch.Generator) -> torch.Tensor:
    ids = torch.randint(0, SYMBOLS, (count, 1), generator=g)
    for _ in range(LENGTH - 1):
        noise = torch.rand(count, generator=g) < 0.1
        follow = torch.where(noise, torch.randint(0, SYMBOLS, (count,), generator=g), table[ids[:, -1]])
        ids = torch.cat([ids, follow[:, None]], 1)
    return ids


@torch.no_grad()
def language_loss(model, rows: torch.Tensor) -> float:
    model.eval()
    logits = model(input_ids=rows).logits
    model.train()
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), rows[:, 1:].flatten()).item()


def main() -> None:
    torch.manual_seed(SEED)
    g = torch.Generator().manual_seed(5 + SEED)
    first = torch.randperm(SYMBOLS, generator=g)
    second = first.clone()
    changed = torch.randperm(SYMBOLS, generator=g)[: SYMBOLS // 2]
    second[changed] = first[changed.roll(1)]  # half of the rules are others

    base = LlamaForCausalLM(LlamaConfig(
        vocab_size=SYMBOLS, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=LENGTH,
    ))
    optimizer = torch.optim.AdamW(base.parameters(), lr=4e-3)
    for _ in range(100):
        rows = sample(first, BATCH, g)
        base(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    config = AdaLoraConfig(
        task_type=TaskType.CAUSAL_LM, init_r=12, target_r=4, tinit=20, tfinal=40, deltaT=5, total_step=ADAPT,
        lora_alpha=32, orth_reg_weight=0.1, target_modules=["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"],
    )
    model = get_peft_model(base, config)
    print(ottava.convert(model, "tensorwise_e4m3"))
    learning = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, ADAPT)

    held = sample(second, 64, g)
    print(f"first loss {language_loss(model, held):.4f}")
    for step in range(ADAPT):
        rows = sample(second, BATCH, g)
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        model.base_model.update_and_allocate(step)  # needs the gradients
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        if step % 20 == 0:
            print(f"{step:4d}  {loss.item():.4f}")
    print(f"final loss {language_loss(model, held):.4f}")


if __name__ == "__main__":
    main()
