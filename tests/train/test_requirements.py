"""A run without text or device, or too large for the memory, is refused with the numbers."""

from __future__ import annotations

import pytest
import torch

from ottava.base.settings import ConfigError
from ottava.train.config import load_config
from ottava.train.data import DeviceError, find_device, refuse_oversized
from ottava.train.model import ByteTransformer


@pytest.mark.parametrize(
    "setting",
    ["batch_size=1000000000000", "sequence_length=1000000000000", "evaluation.batches=1000000000000"]
    + ["model.layers=1000000000000", "model={d_model: 1000000000000}", "model.ffn=1000000000000"],
)
def test_what_no_machine_holds_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"need more than [\d,]+ GB of memory; cpu has"):
        refuse_oversized(load_config(None, [setting]), torch.device("cpu"))


def test_defaults_fit_anywhere_and_parameters_are_counted_as_they_are() -> None:
    for settings in ([], ["model={d_model: 96, layers: 3, heads: 6, kv_heads: 2, ffn: 40}"]):
        config = load_config(None, settings)
        refuse_oversized(config, torch.device("cpu"))
        assert config.model.parameters == sum(p.numel() for p in ByteTransformer(config.model, 8).parameters())


@pytest.mark.skipif(torch.cuda.is_available(), reason="has the hardware whose absence is tested")
def test_device_that_is_not_here_is_refused() -> None:
    assert find_device("auto").type == "cpu"
    with pytest.raises(DeviceError, match="sees 0 CUDA GPUs; set device=cpu or device=auto"):
        find_device("cuda:1")
