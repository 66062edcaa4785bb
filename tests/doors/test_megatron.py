"""Megatron Core's own GPT with ottava's linears, on one rank: bits, recipes from its arguments, schedule, checkpoints.

Megatron asks for a GPU in many places; `compat.on_cpu` answers. Two ranks: tests/distributed/test_megatron_ranks.py.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ottava
from ottava.compat.on_cpu import on_cpu

with warnings.catch_warnings(), on_cpu():
    warnings.simplefilter("ignore")  # Apex and TransformerEngine are not installed
    pytest.importorskip("megatron.core")
    doors = pytest.importorskip("ottava.doors.megatron")
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

TOKENS = torch.randint(0, 128, (2, 32), generator=torch.Generator().manual_seed(1))
PLACES = torch.arange(32)[None].expand(2, -1)
MASK = torch.triu(torch.ones(1, 1, 32, 32, dtype=torch.bool), 1)
LAYERS = [
    f"decoder.layers.{i}.{name}"
    for i in range(2)
    for name in ("self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2")
]


@pytest.fixture(scope="module", autouse=True)
def _one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("megatron") / "store"
    with on_cpu():
        torch.distributed.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(0)
        yield
        parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def configured(**settings: Any) -> Any:
    return TransformerConfig(
        **{"num_layers": 2, "fp8": "hybrid", "fp8_recipe": "tensorwise", **settings},
        hidden_size=64,
        num_attention_heads=4,
        ffn_hidden_size=128,
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16,
        bf16=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
    )


def gpt(config: Any, spec: Any = None) -> Any:
    torch.manual_seed(0)
    model = GPTModel(config, spec or doors.gpt_layer_spec(config), vocab_size=128, max_sequence_length=32)
    return model.bfloat16()


def loss_of(model: Any) -> Tensor:
    return model(TOKENS, PLACES, MASK, labels=TOKENS.roll(-1, 1)).float().mean()


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = loss_of(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-3)


def by_hand(config: Any) -> Any:
    """Megatron's GPT of its own layers, in which each linear hands its rows to an `ottava.nn.Linear`."""
    model = gpt(config, get_gpt_layer_local_spec())
    for name, module in model.decoder.named_modules():
        if type(module).__name__ in ("ColumnParallelLinear", "RowParallelLinear"):
            out, in_ = module.weight.shape
            layer = ottava.nn.Linear(in_, out, bias=False, dtype=torch.bfloat16, recipe="tensorwise")
            layer.weight = module.weight
            if name.endswith("qkv"):  # the others' bias is added by the caller
                layer.bias = module.bias
            module._forward_impl = lambda input, weight, bias, layer=layer, **_: layer(input)
    return model


def test_trains_with_the_bits_of_linears_called_by_hand() -> None:
    config = configured()
    ours, theirs = gpt(config), by_hand(config)
    mine = train(ours, adam(ours), 4)
    assert mine == train(theirs, adam(theirs), 4)
    assert mine[-1] < 0.9 * mine[0]
    assert {row.layer for row in ottava.receipt(ours).rows if row.fp8} == set(LAYERS)
    other = gpt(configured(fp8_recipe="delayed"))  # another recipe has other bits: the comparison can fail
    assert mine != train(other, adam(other), 4)


def test_recipes_come_from_megatrons_arguments() -> None:
    for settings, recipe, spec in (
        ({"fp8": None}, "bf16", "None"),
        ({}, "tensorwise", "E4M3[tensor]"),
        ({"fp8_recipe": "blockwise", "fp8": "e4m3"}, "blockwise", "E4M3[1x128, pow2]"),
        ({"fp8_recipe": "mxfp8", "fp8": "e4m3"}, "mxfp8", "E4M3[1x32, e8m0]"),
        ({"fp8": None, "fp4": "e2m1"}, "nvfp4_rht", "E2M1[1x16, e4m3]"),
    ):
        found = doors.recipe_of(configured(**settings))
        assert found.fprop == ottava.get_recipe(recipe).fprop or recipe == "tensorwise"
        assert str(found.fprop.lhs) == spec
    history = {"fp8_margin": 1, "fp8_amax_history_len": 16, "fp8_amax_compute_algo": "max"}
    delayed = doors.recipe_of(configured(fp8_recipe="delayed", fp8_wgrad=False, **history))
    cell = delayed.dgrad.lhs
    assert (cell.margin, cell.amax_history_len, cell.amax_compute_algo) == (1, 16, "max")
    assert (str(cell.format), delayed.wgrad.lhs, delayed.wgrad.rhs) == ("E5M2", None, None)

    edges = gpt(configured(num_layers=3, first_last_layers_bf16=True))
    loss_of(edges)
    ran = [block.mlp.linear_fc1.last_call.recipe.name for block in edges.decoder.layers]
    assert [name == "bf16" for name in ran] == [True, False, True]


def test_a_recipe_of_ottavas_goes_through_any_spec() -> None:
    """Block specs, MoE and a backend; `recipe` is for those that Megatron has no argument for."""
    config = configured()
    block = doors.with_ottava(get_gpt_decoder_block_spec(config, use_transformer_engine=False), "rowwise")
    model = gpt(config, block)
    loss_of(model)
    assert model.decoder.layers[1].mlp.linear_fc2.last_call.recipe.name == "rowwise"
    assert model.decoder.layers[1].mlp.linear_fc2.name == "decoder.layers.1.mlp.linear_fc2"
    provider = doors.OttavaSpecProvider()
    experts = provider.grouped_mlp_modules(False, False)[1]
    assert experts.linear_fc1 is provider.column_parallel_linear() is doors.OttavaColumnParallelLinear
    assert experts.linear_fc2 is provider.row_parallel_linear() is doors.OttavaRowParallelLinear

    experts = {"num_moe_experts": 2, "moe_router_load_balancing_type": "none", "add_bias_linear": False}
    sparse = configured(fp8=None, **experts)  # with fp8 Megatron asks for TransformerEngine's version
    mixture = gpt(sparse, doors.gpt_layer_spec(sparse, "tensorwise"))
    expert = mixture.decoder.layers[1].mlp.experts.local_experts[1].linear_fc2  # Megatron 0.16 runs its router with
    assert expert.name == "decoder.layers.1.mlp.experts.local_experts.1.linear_fc2"  # TransformerEngine only
    assert expert(torch.ones(3, 128, dtype=torch.bfloat16))[0].shape == (3, 64)
    assert expert.last_call.recipe.name == "tensorwise"


def test_scales_move_where_the_schedule_marks_a_step(tmp_path: Path) -> None:
    """Megatron's optimizers step copies, and so does the SGD here. Two micro-batches, watched, into an event file."""
    model = gpt(config := configured(fp8_recipe="delayed", fp8_amax_history_len=4))
    copies = [parameter.detach().clone().float().requires_grad_() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(copies, 0.1)
    door = model.decoder.layers[0].mlp.linear_fc1.quantizers.input
    seen = []

    def forward(data: Any, model: Any) -> tuple[Tensor, Any]:
        return model(TOKENS, PLACES, MASK, labels=TOKENS.roll(-1, 1)), lambda out: (out.float().mean(), {})

    with ottava.watch(model, tmp_path / "run", every=1, sinks=[{"tensorboard": {"folder": str(tmp_path / "tb")}}]):
        for _ in range(3):
            get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iter([0, 0]),
                model=model,
                num_microbatches=2,
                seq_length=32,
                micro_batch_size=2,
                forward_only=False,
            )
            for copy, parameter in zip(copies, model.parameters(), strict=True):
                copy.grad, parameter.grad = parameter.grad.float(), None
            optimizer.step()
            with torch.no_grad():
                for copy, parameter in zip(copies, model.parameters(), strict=True):
                    parameter.data = copy.detach().to(parameter.dtype)
            seen.append(int((door.amax_history > 0).sum()))
    assert seen == [0, 1, 2]  # the third step's amax waits for the next mark
    assert float(door.staged[0]) > 0
    assert config.fp8_amax_history_len == len(door.amax_history)
    assert list((tmp_path / "tb").glob("events.*"))


def test_checkpoints_hold_histories() -> None:
    """A state dict in the middle, loaded into a new model, gives the bits of the uninterrupted run."""
    config = configured(fp8_recipe="delayed", fp8_amax_history_len=4)
    whole = gpt(config)
    optimizer = adam(whole)
    train(whole, optimizer, 2)
    resumed = gpt(config)
    assert not resumed.load_state_dict(whole.state_dict()).unexpected_keys
    again = adam(resumed)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert train(whole, optimizer, 2) == train(resumed, again, 2)
    fresh = gpt(config)
    assert fresh.decoder.layers[0].mlp.linear_fc1.quantizers.input.scale == 0


def test_what_it_cannot_honour_is_refused() -> None:
    for settings, words in (
        ({"fp8_param": True}, "fp8_param is not in ottava: parameters stay in params_dtype"),
        ({"fp8_dot_product_attention": True}, "attention is Megatron's own"),
    ):
        with pytest.raises(NotImplementedError, match=words):
            doors.recipe_of(configured(**settings))
    with pytest.raises(ValueError, match="unknown fp8_recipe 'custom'"):
        doors.recipe_of(configured(fp8_recipe="custom", fp8_quantizer_factory="a.b"))
    tied = {"init_method": nn.init.zeros_, "skip_weight_param_allocation": True}
    with pytest.raises(NotImplementedError, match="does not do skip_weight_param_allocation; take Megatron's own"):
        doors.OttavaColumnParallelLinear(64, 64, config=configured(), **tied)
    model = gpt(configured())
    with pytest.raises(NotImplementedError, match=r"linear_fc1 takes its input only; got a weight, too"):
        model.decoder.layers[0].mlp.linear_fc1(torch.ones(1, 1, 64), torch.ones(128, 64))
