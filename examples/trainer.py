"""Fine-tunes a model of transformers in FP8 with its Trainer: `python examples/trainer.py`, half a minute on one core.

The model is tiny and random, so nothing is downloaded; give `from_pretrained` a name of yours. The numbers of
`OttavaCallback` go where `report_to` sends the others, and `ottava report` shows the record of the run.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

import ottava
from ottava.doors.trainer import OttavaCallback
from ottava.doors.transformers import OttavaConfig


def download(folder: Path) -> Path:
    """What a name on the Hub would stand for."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "num_hidden_layers": 2}
    AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=256, **sizes)).save_pretrained(folder)
    return folder


def main(folder: Path, steps: int = 20) -> list[dict[str, Any]]:
    """Trains on the bytes of this file; returns the lines of the log."""
    torch.manual_seed(0)
    recipe = OttavaConfig("delayed", skip="*.layers.0.*")
    model = AutoModelForCausalLM.from_pretrained(download(folder / "hub"), quantization_config=recipe)
    text = torch.tensor(list(Path(__file__).read_bytes())).unfold(0, 64, 16)
    data = [{"input_ids": row, "labels": row} for row in text]
    settings = {"max_steps": steps, "logging_steps": 5, "save_steps": steps // 2, "learning_rate": 1e-3}
    args = TrainingArguments(str(folder / "out"), use_cpu=not torch.cuda.is_available(), report_to=[], **settings)
    trainer = Trainer(model, args, train_dataset=data, callbacks=[OttavaCallback()])
    trainer.train()  # train(resume_from_checkpoint=True) goes on with the same bits
    model.save_pretrained(folder / "trained")
    again, said = AutoModelForCausalLM.from_pretrained(folder / "trained", output_loading_info=True)
    print(
        ottava.receipt(model), f"\nloaded again: {type(again).__name__}, complaints:", [k for k, v in said.items() if v]
    )
    return [line for line in trainer.state.log_history if "loss" in line]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        main(Path(made))
