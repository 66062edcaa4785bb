"""Hosts that are missing or too old are named with their extra; models in other hands, with what is in the way."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import distributed as dist
from torch import nn

import ottava
from ottava.cli.app import exit_code
from ottava.doors import host
from ottava.doors.host import HOSTS, Host, HostError, need_host, refuse_model

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


def in_codes(dtype: torch.dtype) -> nn.Module:
    model = net()
    model[2].weight = nn.Parameter(model[2].weight.detach().to(dtype), requires_grad=False)
    return model


def by_gptq() -> nn.Module:
    model = net()
    model.quantization_method = "gptq"  # what transformers notes; such a layer may hold its codes in buffers
    return model


def in_a_parameter_of_its_own() -> nn.Module:
    class Params4bit(nn.Parameter):
        pass

    model = net()
    model[0].weight = Params4bit(model[0].weight.detach())
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
        (lambda: nn.Sequential(nn.LazyLinear(64)), "0.weight has no size yet; run the model once first"),
        (quantized_by_torchao, "0.weight is quantized already (a Int8Tensor of torchao)"),
        (cast_by_torchao, "0 is a Float8Linear of torchao, which quantizes by itself"),
        (lambda: in_codes(torch.float8_e4m3fn), "2.weight is quantized already (torch.float8_e4m3fn)"),
        (lambda: in_codes(torch.int32), "2.weight is quantized already (torch.int32)"),
        (by_gptq, "the model is quantized by 'gptq'; load it without that quantization_config"),
        (in_a_parameter_of_its_own, "0.weight is quantized already (a Params4bit of "),
        (split_by_deepspeed, "0.weight is sharded by DeepSpeed's ZeRO-3"),
    ],
)
def test_a_model_in_other_hands_is_refused(make: Callable[[], nn.Module], said: str) -> None:
    refuse_model("Door", net())
    with pytest.raises(ValueError, match=f"^{re.escape(f'Door: {said}')}"):
        refuse_model("Door", make())


def test_numbers_that_no_quantizer_made_pass() -> None:
    """Complex parameters, a frozen layer, and a wrapper of one's own that has the name of its inner model."""
    model = net()
    model.register_parameter("phase", nn.Parameter(torch.zeros(4, dtype=torch.complex64)))
    model.requires_grad_(False)
    refuse_model("Door", nn.ModuleDict({"module": model}))


def test_a_sharded_or_wrapped_model_is_refused(tmp_path: Path) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        fully_shard(sharded := net(), mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        with pytest.raises(ValueError, match=r"Door: 0\.weight is sharded already, as DTensor; convert first"):
            refuse_model("Door", sharded)
        with pytest.raises(ValueError, match=r"Door: the model is sharded by FSDP1; convert first"):
            refuse_model("Door", FullyShardedDataParallel(net(), device_id=torch.device("cpu")))
        with pytest.raises(ValueError, match=r"Door: the model is wrapped by DistributedDataParallel; convert first"):
            refuse_model("Door", DistributedDataParallel(net()))
    finally:
        dist.destroy_process_group()


def test_a_missing_or_old_host_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest itself stands for a host, too old and new enough."""
    hosts = {"absent": Host("no-such-package", "2", "2.1"), "old": Host("pytest", "999.1", "999.2")}
    monkeypatch.setattr(host, "HOSTS", {**hosts, "new": Host("pytest", "8", "8")})
    need_host("new")
    with pytest.raises(HostError) as absent:
        need_host("absent")
    assert exit_code(absent.value) == 3
    assert str(absent.value) == (
        "ottava's door to absent: got no no-such-package; needs no-such-package 2 or newer (tried: 2.1): "
        "pip install 'ottava[absent]'"
    )
    with pytest.raises(ImportError, match=rf"to old: got pytest {pytest.__version__}; needs pytest 999\.1 or newer"):
        need_host("old")


@pytest.mark.parametrize(
    "found, enough",
    [("0.17.9", False), ("0.9.2", False), ("0.18", True), ("0.18.0.dev0", True), ("0.100", True), ("1", True)],
)
def test_versions_are_compared_as_numbers(found: str, enough: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "HOSTS", {"peft": Host("peft", "0.18.0", "0.21.2")})
    monkeypatch.setattr(host, "version", lambda _: found)
    if enough:
        need_host("peft")
    else:
        with pytest.raises(HostError, match=f"got peft {re.escape(found)}; needs"):
            need_host("peft")


@pytest.mark.parametrize("door", [*HOSTS, "trainer"])
def test_each_door_asks_for_its_host_before_all_else(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "version", lambda _: "0.0.1")
    monkeypatch.delitem(sys.modules, f"ottava.doors.{door}", raising=False)
    with pytest.raises(HostError, match=r"ottava's door to \w+: got .* 0\.0\.1; needs"):
        importlib.import_module(f"ottava.doors.{door}")
    assert not isinstance(sys.modules.get(f"ottava.doors.{door}"), ModuleType)


def test_every_host_has_an_extra_that_asks_for_its_oldest_version() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for door, (package, oldest, _) in HOSTS.items():
        assert f"{package}>={oldest}" in extras[door]


def test_no_host_is_imported_before_its_door() -> None:
    script = f"import ottava, ottava.doors.host, ottava.nn, sys; print({set(HOSTS)} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_an_example_has_at_most_40_lines_of_code() -> None:
    """Without docstrings and empty lines."""
    examples = {*re.findall(r"examples/(\w+\.py)", (ROOT / "docs" / "doors.md").read_text("utf-8"))} - {
        "lora_on_fp8.py"
    }
    assert len(examples) == 6
    for name in examples:
        text = (ROOT / "examples" / name).read_text("utf-8")
        words = set[int]()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
                words |= {*range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)}
        assert sum(bool(line.strip()) and i not in words for i, line in enumerate(text.splitlines(), 1)) <= 40, name


def test_the_page_has_the_versions_and_lines_of_the_doors() -> None:
    """docs/doors.md: a row a door, in the order of HOSTS."""
    page = (ROOT / "docs" / "doors.md").read_text("utf-8")
    rows = re.findall(r"^\|(.+)\| `pip install 'ottava\[(\w+)\]'` \|$", page, re.M)
    assert [extra for _, extra in rows] == list(HOSTS)
    for row, door in rows:
        _, oldest, tried, modules, lines = (cell.strip() for cell in row.split("|"))
        paths = [ROOT / "src" / f"{name.replace('.', '/')}.py" for name in re.findall(r"`([\w.]+)`", modules)]
        each = [len(path.read_text("utf-8").splitlines()) for path in paths]
        assert max(each) <= 160 or door == "megatron", door
        counted = sum(each)
        assert (oldest, tried, lines) == (*HOSTS[door][1:], str(counted)), door
        assert f"`ottava.doors.{door}`" in modules
