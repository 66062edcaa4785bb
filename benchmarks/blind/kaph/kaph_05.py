"""FourierFT by PEFT under the Trainer: a Llama learns a new dialect by 600 numbers in the spectrum of each matrix.

The base was trained on another dialect first and is frozen. The spectra begin at 0, are scaled by 150 and have a rate of 0.05.
"""

import os
import tempfile

import torch
from peft import FourierFTConfig, TaskType, get_peft_model
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import ottava

SEED = int(os.environ.get("SEED", "0"))
WORDS, LENGTH = 48, 24


def dialect(rows: int, seed: int, shift: int) -> torch.Tensor:
    """A word is followed by one of two; the dialect says which of them is the usual one and shifts it."""
    table = torch.Generator().manual_seed(99)
    first, second = (torch.randperm(WORDS, generator=table) for _ in range(2))
    g = torch.Generator().manual_seed(seed)
    words = [torch.randint(WORDS, (rows,), generator=g)]
    for _ in range(LENGTH - 1):
        usual = torch.rand(rows, generator=g) < 0.85
        words.append((torch.where(usual, first[words[-1]], second[words[-1]]) + shift) % WORDS)
    return torch.stack(words, 1)


@torch.no_grad()
def loss_of(model: torch.nn.Module, rows: torch.Tensor) -> float:
    training = model.training
    model.eval()
    loss = float(model(input_ids=rows, labels=rows).loss)
    model.train(training)
    return loss


def pretrain(model: LlamaForCausalLM) -> None:
    """The old dialect, in a plain loop without casts."""
    loader = DataLoader(TensorDataset(dialect(64 * 110, SEED + 1, 0)), batch_size=64)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for (rows,) in loader:
        model(input_ids=rows, labels=rows).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(f"old dialect {loss_of(model, dialect(128, SEED + 300, 0)):.4f}")


def main() -> None:
    set_seed(SEED)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, max_position_embeddings=64, **sizes))
    pretrain(model)
    ottava.convert(model, "mxfp8")
    model = get_peft_model(
        model,
        FourierFTConfig(
            task_type=TaskType.CAUSAL_LM,
            n_frequency=600,
            scaling=150.0,
            init_weights=True,
            target_modules=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
        ),
    )
    model.print_trainable_parameters()
    held_out = dialect(128, SEED + 301, 3)
    print(f"first loss {loss_of(model, held_out):.4f}")
    data = [{"input_ids": row, "labels": row} for row in dialect(2400, SEED + 2, 3)]
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            max_steps=130,
            per_device_train_batch_size=32,
            learning_rate=5e-2,
            weight_decay=0.0,
            max_grad_norm=0.0,
            warmup_steps=10,
            lr_scheduler_type="cosine",
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            label_names=["labels"],
            seed=SEED,
        )
        Trainer(model, args, train_dataset=data).train()
    print(f"final loss {loss_of(model, held_out):.4f}")


if __name__ == "__main__":
    main()
