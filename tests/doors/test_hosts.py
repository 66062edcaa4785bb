"""Hosts that are missing or too old are named with their extra; models that somebody has changed, with what to do."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

import ottava
from ottava.doors.hosts import HOSTS, HostError, need_host, refuse_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", HOSTS)
@pytest.mark.parametrize("version", ["", "0.9.2"])
def test_a_host_that_is_missing_or_old_is_named(name: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(_: str) -> str:
        if not version:
            raise importlib.metadata.PackageNotFoundError
        return version

    monkeypatch.setattr(importlib.metadata, "version", found)
    if (name, version) == ("peft", "0.9.2"):
        assert HOSTS[name].least == "0.18"
    host = HOSTS[name]
    got = f"{name} {version}" if version else f"no {name}"
    wanted = f"{host.module}: got {got}; needs {name} >= {host.least}, tried with {host.tried}: pip install"
    with pytest.raises(HostError, match=re.escape(f"{wanted} 'ottava[{host.extra}]'")):
        need_host(name)


@pytest.mark.parametrize("name", HOSTS)
def test_versions_are_compared_as_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: HOSTS[name].tried)
    need_host(name)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: HOSTS[name].least + ".dev0")
    need_host(name)


def test_every_host_has_an_extra_that_asks_for_its_oldest_version() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for name, host in HOSTS.items():
        assert f"{name}>={host.least}" in extras[host.extra]


def test_no_host_is_imported_before_its_door() -> None:
    script = f"import ottava, ottava.doors, ottava.nn, sys; print({set(HOSTS)} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_model_that_somebody_has_changed_is_named() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def no_sync(self) -> None: ...

    fresh = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16()
    assert refuse_model(fresh) is None
    assert "compiled" in str(refuse_model(torch.compile(fresh)))  # type: ignore[arg-type]
    assert "wrapped by Wrapper" in str(refuse_model(Wrapper(fresh)))
    assert "0.weight is on the meta device" in str(refuse_model(nn.Sequential(nn.Linear(4, 4, device="meta"))))
    ottava.convert(fresh, "rowwise")
    assert refuse_model(fresh) == "'0' runs under recipe 'rowwise' already: convert once"
    coded = nn.Linear(8, 8)
    coded.weight = nn.Parameter(torch.zeros(8, 8, dtype=torch.int8), requires_grad=False)
    assert "weight is a Tensor of torch.int8, quantized by somebody else" in str(refuse_model(coded))
    coded = nn.Linear(8, 8)
    coded.quantization_method = "gptq"  # type: ignore[assignment]
    assert "quantized by 'gptq'" in str(refuse_model(coded))


def test_a_sharded_model_is_named(tmp_path: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(64, 64))
        fully_shard(model)
        assert refuse_model(model) == "0.weight is sharded already: convert first, then shard"
    finally:
        dist.destroy_process_group()
