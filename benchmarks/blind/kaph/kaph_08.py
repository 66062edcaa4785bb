"""Two LoRA adapters on one frozen base learn in turns, with two tongues and two optimizers.

PEFT in a plain loop. Neighbouring steps belong to different tongues, so the losses form two curves.
"""

import os

import torch
from peft import LoraConfig, get_peft_model
from transformers import MistralConfig, MistralForCausalLM, set_seed

import ottava

SEED = int(os.environ.get("SEED", "0"))
WORDS, LENGTH = 60, 20
HALVES = {"easy": (0, 30, 0.97), "hard": (30, 60, 0.6)}


def rows(name: str, count: int, seed: int) -> torch.Tensor:
    """The tongues share no words; in the hard one the next word is a surprise four times in ten."""
    low, high, sure = HALVES[name]
    table = torch.randperm(high - low, generator=torch.Generator().manual_seed(low)) + low
    g = torch.Generator().manual_seed(seed)
    words = [torch.randint(low, high, (count,), generator=g)]
    for _ in range(LENGTH - 1):
        stray = torch.randint(low, high, (count,), generator=g)
        words.append(torch.where(torch.rand(count, generator=g) < sure, table[words[-1] - low], stray))
    return torch.stack(words, 1)


def base() -> MistralForCausalLM:
    """A model that knows all words and an older grammar."""
    model = MistralForCausalLM(
        MistralConfig(
            vocab_size=WORDS,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    g = torch.Generator().manual_seed(SEED + 9)
    for _ in range(60):
        start = torch.randint(WORDS, (32, 1), generator=g)
        batch = (start + 7 * torch.arange(LENGTH)) % WORDS
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@torch.no_grad()
def loss_of(model: torch.nn.Module) -> float:
    """The mean of both tongues, each with its own adapter."""
    model.eval()
    losses = []
    for name in HALVES:
        model.set_adapter(name)
        batch = rows(name, 96, SEED + 800)
        losses.append(float(model(input_ids=batch, labels=batch).loss))
    model.train()
    return sum(losses) / 2


def main() -> None:
    set_seed(SEED)
    model = base()
    ottava.convert(model, "rowwise_with_gw_hp")
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", lora_dropout=0.0)
    model = get_peft_model(model, config, adapter_name="easy")
    model.add_adapter("hard", config)
    optimizers = {
        "easy": torch.optim.AdamW([p for n, p in model.named_parameters() if ".easy." in n], 4e-3),
        "hard": torch.optim.AdamW([p for n, p in model.named_parameters() if ".hard." in n], 8e-3),
    }
    print(f"first loss {loss_of(model):.4f}")
    for step in range(200):
        name = ("easy", "hard")[step % 2]
        model.set_adapter(name)
        batch = rows(name, 32, SEED * 1000 + step)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizers[name].step()
        optimizers[name].zero_grad(set_to_none=True)
        if step % 20 < 2:
            print(f"step {step} {name} loss {loss.item():.4f}")
    print(f"final loss {loss_of(model):.4f}")


if __name__ == "__main__":
    main()
