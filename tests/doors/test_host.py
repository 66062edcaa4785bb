"""What stands between a model and a door is said by name."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import ottava
from ottava.doors import host
from ottava.doors.host import HOSTS, Host, need_host, refuse_model

ROOT = Path(__file__).resolve().parents[2]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).bfloat16()


def converted() -> nn.Module:
    ottava.convert(model := net(), "mxfp8")
    return model


def compiled_in_place() -> nn.Module:
    model = net()
    model.compile(backend="eager")
    return model


def on_meta() -> nn.Module:
    model = net()
    model[2].to("meta")
    return model


def quantized_by_torchao() -> nn.Module:
    torchao = pytest.importorskip("torchao.quantization")
    torchao.quantize_(model := net(), torchao.Int8WeightOnlyConfig())
    return model


def cast_by_torchao() -> nn.Module:
    return pytest.importorskip("torchao.float8").convert_to_float8_training(net())


def in_codes() -> nn.Module:
    model = net()
    model[2].weight = nn.Parameter(model[2].weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    return model


def split_by_deepspeed() -> nn.Module:
    model = net()
    model[0].weight.ds_id = 0  # what DeepSpeed's zero.Init marks a parameter with
    return model


@pytest.mark.parametrize(
    "make, said",
    [
        (converted, "0 is under ottava's recipe 'mxfp8' already; convert once"),
        (lambda: torch.compile(net()), "the model is compiled; hand in the plain model"),
        (compiled_in_place, "the model is compiled"),
        (on_meta, "2.weight is on the meta device, without numbers"),
        (quantized_by_torchao, "0.weight is quantized already (a Int8Tensor of torchao)"),
        (cast_by_torchao, "0 is a Float8Linear of torchao, which quantizes by itself"),
        (in_codes, "2.weight is quantized already (torch.float8_e4m3fn)"),
        (split_by_deepspeed, "0.weight is sharded by DeepSpeed's ZeRO-3"),
    ],
)
def test_a_model_in_other_hands_is_refused(make: Callable[[], nn.Module], said: str) -> None:
    refuse_model("Door", net())
    with pytest.raises(ValueError, match=f"^{re.escape(f'Door: {said}')}"):
        refuse_model("Door", make())


def test_a_sharded_model_is_refused(tmp_path: Path) -> None:
    from torch import distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        fully_shard(sharded := net(), mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        with pytest.raises(ValueError, match=r"Door: 0\.weight is sharded already, as DTensor; convert first"):
            refuse_model("Door", sharded)
        with pytest.raises(ValueError, match=r"Door: the model is sharded by FSDP1; convert first"):
            refuse_model("Door", FullyShardedDataParallel(net(), device_id=torch.device("cpu")))
    finally:
        dist.destroy_process_group()


def test_a_missing_or_old_host_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest itself stands for a host, too old and new enough."""
    hosts = {"absent": Host("no-such-package", "2", "2.1"), "old": Host("pytest", "999.1", "999.2")}
    monkeypatch.setattr(host, "HOSTS", {**hosts, "new": Host("pytest", "8", "8")})
    need_host("new")
    with pytest.raises(ModuleNotFoundError) as absent:
        need_host("absent")
    assert str(absent.value) == (
        "ottava.doors.absent: no-such-package is not installed; needs no-such-package 2 or newer (tried: 2.1): "
        "pip install 'ottava[absent]'"
    )
    with pytest.raises(ImportError, match=rf"got pytest {pytest.__version__}; needs pytest 999\.1 or newer"):
        need_host("old")


@pytest.mark.parametrize("door", HOSTS)
def test_each_host_has_an_extra_and_a_check(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An import of the door asks for its host before all else, and pyproject has the extra that the error names."""
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    assert f'\n{door} = ["{HOSTS[door].package}>={HOSTS[door].oldest}' in project
    monkeypatch.setattr(host, "version", lambda name: "0.0.1")
    monkeypatch.delitem(sys.modules, f"ottava.doors.{door}", raising=False)
    with pytest.raises(ImportError, match=rf"ottava\.doors\.{door}: got .* 0\.0\.1; needs"):
        importlib.import_module(f"ottava.doors.{door}")
    assert not isinstance(sys.modules.get(f"ottava.doors.{door}"), ModuleType)
