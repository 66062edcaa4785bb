"""A whole `axolotl train` on a CPU, where all of Axolotl is installed: model and data lie on this disk.

The file is also the script of its test: Axolotl needs the package `kernels`, and tests/ has a folder of that name.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "door_axolotl.yaml"


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_axolotl_train_logs_saves_and_loads_again(adapter: str, tmp_path: Path) -> None:
    if not all(map(find_spec, ("axolotl", "xformers", "trackio"))):
        pytest.skip("Axolotl without its dependencies")
    command = [sys.executable, __file__, str(tmp_path), adapter]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.endswith("loaded again\n"), done.stderr[-3000:]


def train(folder: Path, adapter: str) -> None:
    """Trains with the example's settings, LoRA or not, and reads what is left."""
    from peft import PeftModel
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", *letters])}
    made = Tokenizer(models.BPE(vocab=words, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(folder / "model")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **sizes)).save_pretrained(folder / "model")
    lines = (json.dumps({"instruction": f"Add one to {i}.", "input": "", "output": str(i + 1)}) for i in range(64))
    (folder / "data.jsonl").write_text("\n".join(lines))

    settings = yaml.safe_load(EXAMPLE.read_text("utf-8"))
    if adapter == "none":
        settings = {key: value for key, value in settings.items() if "lora" not in key and key != "adapter"}
    settings |= {"base_model": str(folder / "model"), "output_dir": str(folder / "out"), "max_steps": 8}
    settings |= {"datasets": [{"path": str(folder / "data.jsonl"), "ds_type": "json", "type": "alpaca"}]}
    settings |= {"bf16": False, "fp16": False, "ottava_recipe": "delayed", "logging_steps": 4, "sequence_len": 256}
    settings |= {"dataset_prepared_path": str(folder / "prepared"), "learning_rate": 0.01}
    (folder / "axolotl.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "axolotl.cli.main", "train", "axolotl.yaml", "--launcher", "python"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]

    told = json.loads((folder / "out" / "checkpoint-8" / "trainer_state.json").read_text())["log_history"]
    assert told[1]["loss"] < told[0]["loss"], told
    assert 0 < told[1]["ottava/fp8_share"] < 1, told
    if adapter == "none":
        again, said = AutoModelForCausalLM.from_pretrained(folder / "out", output_loading_info=True)
        assert not any(said.values()), said
        assert again.model.layers[1].mlp.up_proj.recipe.name == "delayed"
        assert type(again.model.layers[0].mlp.up_proj).__name__ == "Linear"
    else:
        base = AutoModelForCausalLM.from_pretrained(folder / "model")
        assert PeftModel.from_pretrained(base, folder / "out").peft_config["default"].r == settings["lora_r"]
    print(told, "loaded again")


if __name__ == "__main__":
    import ottava.doors.transformers  # noqa: F401  # what from_pretrained asks for

    train(Path(sys.argv[1]), sys.argv[2])
