"""The byte model: size, causality, the same as in plain torch, initial weights."""

from __future__ import annotations

import math

import pytest
import torch

from ottava.bench.models import PlainByteTransformer
from ottava.train.checkpoint import _renamed
from ottava.train.config import ModelConfig
from ottava.train.model import ByteTransformer, loss

SMALL = ModelConfig(d_model=32, layers=2, heads=4, kv_heads=2, ffn=48)


def build(config: ModelConfig = SMALL, length: int = 24) -> ByteTransformer:
    torch.manual_seed(0)
    return ByteTransformer(config, length)


def build_plain(config: ModelConfig = SMALL, length: int = 24) -> PlainByteTransformer:
    torch.manual_seed(0)
    return PlainByteTransformer(config, length)


def test_default_size_is_about_a_million_parameters() -> None:
    """2 x 256 x 128 embeddings and head, 5 x (256 + 128) x 128 attention, 5 x 3 x 384 x 128 MLP, 11 gains of 128."""
    expected = 2 * 256 * 128 + 5 * ((256 + 128) * 128 + 3 * 384 * 128) + 11 * 128
    assert sum(p.numel() for p in ByteTransformer(ModelConfig(), 128).parameters()) == expected == 1_049_984


def test_state_dict_holds_parameters_only() -> None:
    model = build()
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}
    assert model.lm_head.weight is not model.embedding.weight


def test_later_bytes_do_not_change_earlier_logits() -> None:
    model = build()
    ids = torch.randint(0, 256, (2, 24))
    changed = ids.clone()
    changed[:, 13] = (changed[:, 13] + 1) % 256
    with torch.no_grad():
        before, after = model(ids), model(changed)
    assert torch.equal(before[:, :13], after[:, :13])
    assert not torch.equal(before[:, 13:], after[:, 13:])


def test_shorter_sequence_gives_the_prefix_of_the_logits() -> None:
    model = build()
    ids = torch.randint(0, 256, (2, 24))
    with torch.no_grad():
        torch.testing.assert_close(model(ids[:, :9]), model(ids)[:, :9], rtol=0, atol=1e-5)  # ~100 roundings near 1


@pytest.mark.parametrize("autocast", [False, True])
def test_it_is_the_same_model_as_in_plain_torch(autocast: bool) -> None:
    """The same initial weights; logits to the bit, and gradients up to the rounding of a norm's backward.

    That is one of fp32, or of BF16 (2**-9 of a number) in front of a GEMM under autocast, in 2 blocks.
    """
    model, plain = build(), build_plain()
    ids = torch.randint(0, 256, (2, 25))
    moved = {_renamed(f".{name}")[1:]: name for name in plain.state_dict()}
    assert set(moved) == set(model.state_dict())
    for name, before in moved.items():
        assert torch.equal(model.state_dict()[name], plain.state_dict()[before]), name
    for net in (model, plain):
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.ndim == 1:
                    parameter.copy_(torch.linspace(0.5, 1.5, len(parameter)))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss(net, ids[:, :-1], ids[:, 1:]).backward()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert torch.equal(model(ids[:, :24]), plain(ids[:, :24]))
    grads = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in model.named_parameters():
        expected = grads[moved[name]]
        assert parameter.grad is not None
        assert expected is not None
        assert (parameter.grad - expected).norm() <= (2**-7 if autocast else 2**-20) * expected.norm(), name


def test_untrained_model_guesses_nearly_evenly() -> None:
    """ln 256 = 5.545 nats for an even guess; logits of variance 1 (unit rows of the head, normed stream) cost 1/2."""
    model = build(ModelConfig(), 64)
    ids = torch.randint(0, 256, (4, 65))
    assert loss(model, ids[:, :-1], ids[:, 1:]).item() == pytest.approx(math.log(256) + 0.5, abs=0.1)


def test_matrices_start_at_one_over_root_width_and_those_that_write_to_the_stream_smaller() -> None:
    """1 / sqrt(128) = 0.088; over sqrt(2 * 5 layers): 0.028."""
    model = build(ModelConfig(), 8)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones_like(parameter))
            continue
        writes = name.endswith(("o_proj.weight", "down_proj.weight"))
        expected = 0.0884 / math.sqrt(10) if writes else 0.0884
        assert parameter.std().item() == pytest.approx(expected, rel=0.05), name


@pytest.mark.parametrize("autocast", [False, True])
def test_every_parameter_learns(autocast: bool) -> None:
    model = build()
    ids = torch.randint(0, 256, (2, 25))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        value = loss(model, ids[:, :-1], ids[:, 1:])
    value.backward()
    assert value.dtype == torch.float32
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name
