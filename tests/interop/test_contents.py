"""What a checkpoint holds, in the forms that people have on disk: by the numbers that were put in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ottava
from ottava.interop.contents import StateFileError, TensorFacts, read_contents

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


def facts(path: Path) -> dict[str, TensorFacts]:
    return {one.name: one for one in read_contents(path).tensors}


def test_a_folder_of_hugging_face_in_fp8(tmp_path: Path) -> None:
    """Two files and an index: codes with their largest magnitude, and the range of the scales beside them."""
    codes, scales = torch.tensor([[448.0, -1.0], [2.0, 0.5]]).to(E4M3), torch.tensor([[0.25], [0.5]])
    save_file({"up.weight": codes, "up.weight_scale_inv": scales}, tmp_path / "model-1.safetensors")
    save_file({"norm.weight": torch.tensor([-3.0, 2.0]).bfloat16()}, tmp_path / "model-2.safetensors")
    weight_map = {"up.weight": 1, "up.weight_scale_inv": 1, "norm.weight": 2}
    index = {"weight_map": {name: f"model-{number}.safetensors" for name, number in weight_map.items()}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"model_type": "llama", "hidden_size": 2, "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_contents(tmp_path)
    assert found.settings == {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}
    assert found.summary.endswith("3 tensors, 16 bytes: 1 float8_e4m3fn, 1 float32, 1 bfloat16")
    assert facts(tmp_path)["up.weight"] == TensorFacts(
        "up.weight", "float8_e4m3fn", (2, 2), 4, 448.0, "up.weight_scale_inv", 0.25, 0.5
    )
    assert facts(tmp_path)["norm.weight"].amax == 3.0
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(StateFileError, match=r"model-2\.safetensors: does not exist"):
        read_contents(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b.safetensors"}}')
    with pytest.raises(StateFileError, match="no file of this folder"):
        read_contents(tmp_path)


def test_bytes_of_e8m0_and_packed_codes(tmp_path: Path) -> None:
    """2**-127 is byte 0; what is packed has no magnitude."""
    packed = {"mlp.w_blocks": torch.zeros(2, 16, dtype=torch.uint8), "mlp.w_scales": torch.tensor([126, 128]).byte()}
    save_file(packed | {"x": torch.ones(2).to(E8M0), "n": torch.tensor([])}, tmp_path / "a.safetensors")
    found = facts(tmp_path / "a.safetensors")
    one = found["mlp.w_blocks"]
    assert (one.amax, one.scale, one.scale_min, one.scale_max) == (None, "mlp.w_scales", 0.5, 2.0)
    assert (found["x"].amax, found["n"].amax) == (1.0, None)


def test_a_lora_adapter(tmp_path: Path) -> None:
    save_file({"q.lora_A.weight": torch.full((2, 4), 0.5)}, tmp_path / "adapter_model.safetensors")
    config: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q"], "bias": "none"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    found = read_contents(tmp_path)
    assert found.settings == {name: value for name, value in config.items() if name != "bias"}
    assert found.tensors[0].amax == 0.5
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(StateFileError, match="needs one JSON object"):
        read_contents(tmp_path)


def test_a_checkpoint_of_ours_with_codes_and_histories(tmp_path: Path) -> None:
    """Codes, their scales, and the state that inspect checks; a run means its newest checkpoint."""
    with ottava.model_init("delayed"):
        layer = ottava.nn.Linear(64, 64, recipe="delayed")
    (tmp_path / "checkpoints").mkdir()
    for step in (1, 2):
        torch.save({"model": layer.state_dict(), "step": step}, tmp_path / "checkpoints" / f"step-00000{step}.pt")
    found = read_contents(tmp_path)
    assert found.path.name == "step-000002.pt"
    assert found.state is not None
    (weight,) = [one for one in found.tensors if one.name == "model.weight"]
    assert (weight.dtype, weight.scale) == ("float8_e4m3fn", "model.weight_scale_inv")
    assert weight.amax == layer.state_dict()["weight"].float().abs().max()


def test_lists_are_opened(tmp_path: Path) -> None:
    torch.save(
        {"stages": [torch.ones(2), {"w": torch.full((3,), -2.0)}], "epoch": 3, "note": "text"}, tmp_path / "a.pt"
    )
    assert {name: one.amax for name, one in facts(tmp_path / "a.pt").items()} == {"stages.0": 1.0, "stages.1.w": 2.0}


@pytest.mark.parametrize("contents", [{"epoch": 3}, {}])
def test_no_tensor_is_a_bad_input(contents: dict[str, Any], tmp_path: Path) -> None:
    torch.save(contents, tmp_path / "a.pt")
    with pytest.raises(StateFileError, match="holds no tensor") as caught:
        read_contents(tmp_path / "a.pt")
    assert caught.value.exit_code == 4


def test_numbers_that_are_none_stay_visible(tmp_path: Path) -> None:
    """A NaN is an amax of NaN, and null in JSON."""
    save_file({"w": torch.tensor([1.0, torch.nan])}, tmp_path / "a.safetensors")
    found = read_contents(tmp_path / "a.safetensors")
    assert found.tensors[0].amax != found.tensors[0].amax
    assert found.to_dict()["tensors"][0]["amax"] is None
