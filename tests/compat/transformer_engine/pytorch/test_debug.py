"""TransformerEngine's debug tool: its configuration changes casts and records statistics, in a session of a script."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ottava.compat.transformer_engine.pytorch as te
from ottava.compat.transformer_engine.common.recipe import DelayedScaling
from ottava.compat.transformer_engine.pytorch.debug_stats import STATS_BUFFERS, ConfigManager, TEConfigAPIMapper
from ottava.compat.transformer_engine.pytorch.execution import Tool
from ottava.debug import Run

CHANGES = """
zero: {enabled: True, layers: {layer_types: [nowhere]}, transformer_engine: {Nothing: {enabled: True}}}
one:
  {enabled: True, layers: {layer_types: [fc1]}, transformer_engine: {
    DisableFP8GEMM: {enabled: True, gemms: [dgrad]},
    PerTensorScaling: {enabled: True, gemms: [wgrad], tensors: [activation]}}}
two:
  {enabled: True, layers: {layer_types: [fc2]}, transformer_engine: {FakeQuant: {enabled: True, gemms: [fprop],
    tensors_struct: [{tensor: activation, quant_format: FP8E4M3}, {tensor: weight, quant_format: FP8E5M2}]}}}
"""


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tool]:
    """As `import nvdlfw_inspect.api` leaves it in a script."""
    tool = Tool()
    monkeypatch.setitem(sys.modules, "nvdlfw_inspect.api", SimpleNamespace(tool=tool))
    yield tool
    tool.end_debug()


def test_a_configuration_changes_the_casts_of_an_autocast(tool: Tool, tmp_path: Path) -> None:
    """Of the layers that it names, until the session ends; both formats of one fake GEMM count."""
    (tmp_path / "config.yaml").write_text(CHANGES)
    with pytest.warns(UserWarning, match="unknown feature 'Nothing'"):
        tool.initialize(tmp_path / "config.yaml", log_dir=tmp_path)
    layers = [te.Linear(32, 32, bias=False, name=f"block.{name}", device="cpu") for name in ("fc1", "fc2", "other")]

    def cells() -> list[dict[str, str]]:
        with te.autocast(recipe=DelayedScaling()):
            results.append([layer(x) for layer in layers])
        recipes = [layer.last_call.recipe for layer in layers]
        return [{gemm: str(getattr(recipe, gemm)) for gemm in ("fprop", "dgrad", "wgrad")} for recipe in recipes]

    x, results = torch.randn(32, 32), []
    one, two, plain = cells()
    current = te.Float8CurrentScalingQuantizer
    e4m3, e5m2 = (current(dtype) for dtype in (te.DType.kFloat8E4M3, te.DType.kFloat8E5M2))
    fake = torch.nn.functional.linear(e4m3(x).dequantize(), e5m2(layers[1].weight).dequantize())
    torch.testing.assert_close(results[0][1], fake)
    assert one == {
        "fprop": plain["fprop"],
        "dgrad": "high precision x high precision",
        "wgrad": plain["wgrad"].rpartition(" x ")[0] + " x E4M3[tensor]",
    }
    assert two == {**plain, "fprop": "high precision x high precision"}
    asked = tool.transformer_engine
    assert [asked.fp8_gemm_enabled("b.fc1", gemm, 0)[0] for gemm in ("fprop", "dgrad", "wgrad")] == [True, False, True]
    with pytest.raises(ValueError, match="initialize was called twice"):
        tool.initialize()
    tool.end_debug()
    assert cells() == [plain] * 3


def test_statistics_are_those_of_a_watch(tool: Tool, tmp_path: Path) -> None:
    """In the steps that the configuration names; a layer without a name gets a number."""
    text = (
        "log: {enabled: True, layers: {layer_name_regex_pattern: .*}, transformer_engine: {LogFp8TensorStats: "
        "{enabled: True, tensors: [activation], stats: ['underflows%'], freq: 2}}}"
    )
    (tmp_path / "config.yaml").write_text(text)
    tool.initialize(tmp_path / "config.yaml", log_dir=tmp_path)
    layer = te.Linear(32, 32, device="cpu")
    for _ in range(4):
        with te.autocast():
            layer(torch.randn(32, 32)).sum().backward()
        tool.step()
    tool.end_debug()
    table = Run.open(tmp_path / "ottava").table()
    assert set(table["step"].tolist()) == {1, 3}
    assert {(slot.layer, slot.tensor) for slot in table.slots()} == {("Layer_1", "input")}
    model = torch.nn.Sequential(layer)
    tool.infer_and_assign_layer_names(model)
    assert layer.name == "model.0"


def test_the_log_is_theirs_and_a_script_may_feed_it(tool: Tool, tmp_path: Path) -> None:
    """Numbers of a layer's casts and of a tensor given by hand, two micro-batches as one; read back as an import."""
    text = (
        "log: {enabled: True, layers: {layer_name_regex_pattern: fc}, transformer_engine: {LogTensorStats: {enabled: "
        "True, tensors: [activation], stats: [std, max, {max_blockwise_dynamic_range: {block_size: 4, dims: 2}}]}, "
        "LogFp8TensorStats: {enabled: True, tensors: [activation, gradient], stats: ['underflows%', mxfp8_mse]}}}"
    )
    (tmp_path / "config.yaml").write_text(text)
    tool.initialize(tmp_path / "config.yaml", log_dir=tmp_path)
    x = torch.randn(32, 32)
    codes = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3)(x)
    for part in (x[:16], x[16:]):
        tool.inspect_tensor("fc", "activation", 0, tensor=part)
    both = STATS_BUFFERS.log_stats()
    tool.inspect_tensor("fc", "activation", 0, tensor=x, rowwise_quantized_tensor=codes)
    whole = STATS_BUFFERS.log_stats()
    torch.testing.assert_close(both["fc", "activation", "std", 0], x.std())
    assert both["fc", "activation", "max", 0] == x.max()
    lost = ((codes.dequantize() == 0) & (x != 0)).float().mean()
    assert whole["fc", "activation", "underflows%", 0] == 100 * lost
    layer = te.Linear(32, 32, name="fc1", device="cpu")
    with te.autocast():
        layer(x).sum().backward()
    tool.step()
    assert not tool.inspect_tensor_enabled("fc", "weight", 0)[0]
    assert not tool.modify_tensor_enabled("fc", "fprop", "weight", 0)[0]
    lines = (tmp_path / "nvdlfw_inspect_statistics_logs" / "nvdlfw_inspect_globalrank-0.log").read_text()
    assert {"fc1_activation_std", "fc1_gradient_mxfp8_mse", "fc_activation_mxfp8_mse"} <= set(lines.split())
    config = ConfigManager.get_config_for_layer("fc9")["transformer_engine"]["LogFp8TensorStats"]
    assert TEConfigAPIMapper().parse_config_and_api(config, tensor_parsing=True, tensor_name="gradient")[0]
    assert not TEConfigAPIMapper().parse_config_and_api(config, tensor_parsing=True, tensor_name="weight")[0]


FEATURE = """
from ottava.compat.transformer_engine.pytorch.debug_stats import MetricLogger, Registry, TEConfigAPIMapper, api_method

@Registry.register_feature(namespace="transformer_engine")
class Largest(TEConfigAPIMapper):
    seen, asked = {}, []

    @api_method
    def inspect_tensor_enabled(self, config, layer_name, tensor_name, iteration):
        self.asked.append(tensor_name)
        return (False, None) if tensor_name == "output" else (iteration % config["freq"] == 0, iteration + 1)

    @api_method
    def inspect_tensor(self, config, layer_name, tensor_name, iteration, tp_group, tensor, **codes):
        self.seen[tensor_name, iteration] = tensor.clone()
        MetricLogger.log_scalar(f"{layer_name}_{tensor_name}_largest", tensor.abs().max(), iteration)
"""


@pytest.mark.parametrize("fp8", [False, True])
def test_a_feature_of_a_script_sees_tensors_and_scales_move_without_an_optimizer(
    tool: Tool, tmp_path: Path, fp8: bool
) -> None:
    """Beside autograd's gradients of the same step; a feature that wants a tensor never is asked once."""
    names = "activation, weight, gradient, output, wgrad, dgrad"
    feature = f"{{Largest: {{enabled: True, tensors: [{names}], freq: 2}}}}"
    text = f"one: {{enabled: True, layers: {{layer_types: [fc]}}, transformer_engine: {feature}}}"
    (tmp_path / "config.yaml").write_text(text)
    (tmp_path / "largest.py").write_text(FEATURE)
    tool.initialize(tmp_path / "config.yaml", feature_dirs=[str(tmp_path)], log_dir=tmp_path)
    layer, other = te.Linear(32, 16, name="fc", device="cpu"), te.Linear(16, 16, name="last", device="cpu")
    for step in range(3):
        x = ((1 + step) * torch.ones(32, 32)).requires_grad_()
        layer.zero_grad()
        with te.autocast(fp8, recipe=DelayedScaling(amax_history_len=1)):
            y = layer(x)
            y.retain_grad()
            other(y).square().sum().backward()
        tool.step()
    if fp8:  # the scale of the last step's amax
        assert float(layer.quantizers.input.scale) == 448 / 2
    own = tool.features["Largest"]
    wanted = {"activation": x, "weight": layer.weight, "gradient": y.grad, "wgrad": layer.weight.grad, "dgrad": x.grad}
    assert own.seen.keys() == {(name, step) for name in wanted for step in (0, 2)}
    assert all(torch.equal(own.seen[name, 2], tensor) for name, tensor in wanted.items())
    assert (own.asked.count("output"), own.asked.count("dgrad")) == (1, 3)
    lines = (tmp_path / "nvdlfw_inspect_statistics_logs" / "nvdlfw_inspect_globalrank-0.log").read_text()
    assert "fc_activation_largest\t\titeration=000002\t\tvalue=3.0000\n" in lines
