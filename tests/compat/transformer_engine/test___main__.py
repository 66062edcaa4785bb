"""Scripts written for TransformerEngine, run by the command as they are: in processes of their own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import torch

import warm

SCRIPT = """
import sys
import torch
import transformer_engine
import transformer_engine.pytorch as te
from transformer_engine.common import recipe
from transformer_engine.common.recipe import DelayedScaling, Format
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch import Float8Tensor, TransformerLayer, make_graphed_callables

torch.manual_seed(0)
model = torch.nn.Sequential(
    te.LayerNormMLP(64, 128, bias=True), te.LayerNormLinear(64, 64), te.Linear(64, 10, bias=True)
)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
fp8_recipe = DelayedScaling(margin=0, fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max")
x, y = torch.randn(32, 64), torch.randint(10, (32,))
for step in range(30):
    with te.fp8_autocast(enabled=True, fp8_recipe=fp8_recipe):
        loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 0:
        first = float(loss)
print(sys.argv[1:], float(loss) < first / 4, model[2].last_call.records["fprop"].quantized)
"""


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return warm.run(["-m", "ottava.compat.transformer_engine", *map(str, arguments)], timeout=800)


def test_a_script_runs_unchanged_and_learns(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ran = run(script, "--epochs", 3)
    assert (ran.returncode, ran.stdout) == (0, "['--epochs', '3'] True True\n"), ran.stderr


def test_what_cannot_run_says_what_to_do(tmp_path: Path) -> None:
    """No script, a missing script, TransformerEngine for JAX, and a GPU on a machine without one."""
    assert run("--help").stdout.startswith("python -m ottava.compat.transformer_engine [--cpu] script.py")
    missing = run(tmp_path / "nowhere.py")
    assert (missing.returncode, missing.stderr.strip()) == (
        2,
        f"{tmp_path / 'nowhere.py'}: No such file or directory; needed: a Python script",
    )
    script = tmp_path / "kernels.py"
    script.write_text(
        "import torch, transformer_engine.pytorch as te, transformer_engine_torch as tex\n"
        "x = te.cpp_extensions.general_gemm(*torch.ones(2, 1, 1))[0].expand(1, 2)[0].clone()\n"
        "tex.multi_tensor_scale(0, torch.zeros(1), [[x], [x]], 0.5)\nprint(x, tex.DType.kFloat8E4M3.value)\ntex.gelu(x)"
    )
    kernels = run(script)
    assert kernels.stdout == "tensor([0.5000, 0.5000]) 7\n"
    assert "transformer_engine_torch.gelu is not in ottava: it is a kernel of CUDA" in kernels.stderr
    script = tmp_path / "jax.py"
    script.write_text("try:\n    import transformer_engine.jax\nexcept ModuleNotFoundError as no:\n    print(no)\n")
    assert run(script).stdout == "transformer_engine.jax is not in ottava, only transformer_engine.pytorch\n"
    script.write_text(
        "import torch\nif torch.cuda.is_available():\n    raise RuntimeError('CUDA')\n"
        "import transformer_engine.pytorch as te\nte.Linear(4, 4).cuda()\n"
    )
    failed = run(script)
    assert failed.returncode == 1
    if "This machine has no CUDA device" not in failed.stderr:
        assert "RuntimeError: CUDA" in failed.stderr  # it has one
    script.write_text("import transformer_engine.pytorch as te\nte.Linear(4, 4, device='cuda')\n")


ON_A_GPU = """
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Format

assert torch.cuda.is_available(), "this tutorial needs a GPU"
torch.manual_seed(1)
layer = te.TransformerLayer(64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0, device="cuda").to(torch.bfloat16)
x = torch.rand(16, 2, 64, dtype=torch.bfloat16).cuda()
optimizer = te.optimizers.FusedAdam(layer.parameters(), lr=1e-3)
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
torch.cuda.synchronize()
start.record()
for step in range(4):
    with te.fp8_autocast(enabled=True, fp8_recipe=DelayedScaling(fp8_format=Format.HYBRID)):
        y = layer(x)
    loss = (y - x).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
end.record()
torch.cuda.synchronize()
start.elapsed_time(end)
"""


def test_a_script_for_a_gpu_runs_on_a_cpu(tmp_path: Path) -> None:
    """Unchanged, with the losses of the script whose CUDA was taken out by hand; what has no counterpart is named."""
    script, by_hand = tmp_path / "tutorial.py", tmp_path / "by_hand.py"
    script.write_text(ON_A_GPU)
    lines = [
        line for line in ON_A_GPU.splitlines() if not any(w in line for w in ("torch.cuda.", ".record()", "elapsed"))
    ]
    by_hand.write_text("\n".join(lines).replace(', device="cuda"', ', device="cpu"').replace(".cuda()", ""))
    ran, expected = run("--cpu", script), run(by_hand)
    assert (ran.returncode, expected.returncode) == (0, 0), ran.stderr + expected.stderr
    assert ran.stdout == expected.stdout
    assert len(ran.stdout.split()) == 4
    assert "--cpu: 'cuda' devices, .cuda() and the questions of torch.cuda go to the CPU" in ran.stderr

    script.write_text("import torch\ntorch.cuda.get_device_properties(0)\n")
    failed = run("--cpu", script)
    assert failed.returncode == 1
    if not torch.backends.cuda.is_built():
        assert "needs a CUDA device: --cpu has no counterpart of it. Leave the call out." in failed.stderr
    assert run("--cpu").returncode == 2
    assert run("--cpu").stderr == "--cpu: got no script; needed: --cpu script.py [arguments]\n"
