"""Rotary embedding turns pairs by angles that grow with the position, as complex numbers and Hugging Face's code do."""

from __future__ import annotations

import itertools

import pytest
import torch

from ottava.nn.rope import RotaryEmbedding, RotaryScaling, RotaryTable, _lines, rotate

SCALINGS = (
    {},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "truncate": False, "beta_fast": 16},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
)


def test_a_pair_is_a_complex_number_that_is_turned() -> None:
    """Full and partial, both pairings, every layout and dtype, positions of any start."""
    positions = torch.tensor([0, 1, 5, 1000])
    for dim, interleaved, scaling, dtype in itertools.product(
        (2, 8, 12), (True, False), SCALINGS, (torch.float32, torch.bfloat16)
    ):
        made = RotaryScaling(**scaling)
        table = RotaryEmbedding(dim, interleaved=interleaved, scaling=scaling)(positions)
        x = torch.randn(2, 4, 3, 12, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
        y = rotate(x, table)
        assert torch.equal(y[..., dim:], x[..., dim:])
        first, second = (
            (slice(0, dim, 2), slice(1, dim, 2)) if interleaved else (slice(0, dim // 2), slice(dim // 2, dim))
        )
        angles = torch.outer(positions.double(), made.frequencies(dim, 10_000.0).double())[:, None]
        turn = torch.polar(torch.full_like(angles, made.amplitude), angles)
        xd = x.detach().double()
        wanted = torch.complex(xd[..., first], xd[..., second]) * turn
        # an angle is rounded to fp32 once, then cos, sin, two products, a sum, and the result to its dtype
        u, size = 2.0**-24, 2 * made.amplitude * xd.abs().amax().item()
        bound = size * (u * (angles.max().item() + 6) + torch.finfo(dtype).eps)
        assert (y[..., first].double() - wanted.real).abs().max() <= bound
        assert (y[..., second].double() - wanted.imag).abs().max() <= bound
        if made.amplitude == 1.0:  # a rotation: backward turns back
            (dx,) = torch.autograd.grad(y, x, y.detach())
            assert (dx.double() - xd).abs().max() <= 2 * bound
        assert torch.equal(
            rotate(
                x.transpose(0, 1), RotaryEmbedding(dim, interleaved=interleaved, scaling=scaling)(positions[:, None])
            ),
            y.transpose(0, 1),
        )


def test_tables_are_hugging_faces_bit_for_bit() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    positions = torch.arange(0, 3000, 7)[None]
    for scaling, base in itertools.product(SCALINGS, (10_000.0, 500_000.0)):
        config = llama.LlamaConfig(
            hidden_size=256,
            num_attention_heads=4,
            max_position_embeddings=4096,
            rope_parameters={"rope_type": "default", **scaling, "rope_theta": base},
        )
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(1, positions.shape[1], 4, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
            cos, sin = llama.LlamaRotaryEmbedding(config)(x, positions)
            table = RotaryEmbedding(64, base=base, scaling=scaling, dtype=dtype)(positions)
            assert torch.equal(table.cos[:, :, 0], cos)
            assert torch.equal(table.sin[:, :, 0, 32:], sin[..., 32:])
            wanted, _ = llama.apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=2)
            assert torch.equal(rotate(x, table), wanted)
    functions = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    longer, _ = functions["dynamic"](config, None, 2 * 4096)  # "dynamic" at twice the length: 2 * 2 - 1
    assert torch.equal(RotaryScaling("ntk", factor=3.0).frequencies(64, 10_000.0), longer)


def test_mistakes_are_named() -> None:
    for settings, words in (
        ({"rope_type": "yarm"}, "did you mean 'yarn'?"),
        ({"rope_type": "linear", "factor": 0.5}, "factor is 0.5; needs 1 or more"),
        ({"rope_type": "llama3", "factor": 8.0}, "needs original_max_position_embeddings"),
    ):
        with pytest.raises(ValueError, match=r"^RotaryScaling: ") as error:
            RotaryScaling(**settings)
        assert words in str(error.value)
    with pytest.raises(TypeError, match="did you mean 'factor'"):
        RotaryScaling(facto=2.0)
    with pytest.raises(ValueError, match="dim is 5; needs an even number"):
        RotaryEmbedding(5)
    with pytest.raises(ValueError, match="heads of 4 entries; the table turns 8"):
        rotate(torch.ones(1, 1, 4), RotaryEmbedding(8)(torch.arange(1)))


def test_a_rotation_to_fp32_is_that_of_the_widened_heads_with_all_its_derivatives() -> None:
    """The bits of torch's lines: forward, backward, backward of backward, tangents and vmap; also without gradients."""
    table = RotaryEmbedding(8)(torch.arange(5))
    for interleaved, dtype, dim in itertools.product(
        (True, False), (torch.float32, torch.bfloat16, torch.float16), (8, 12)
    ):
        table = table._replace(interleaved=interleaved)
        qkv = torch.randn(2, 5, 6, dim, generator=torch.Generator().manual_seed(0)).to(dtype)
        x = qkv[:, :, 1:4].clone().requires_grad_()

        def lines(x: torch.Tensor, table: RotaryTable = table) -> torch.Tensor:
            return _lines(x.float(), *table, torch.float32, False)

        def fused(x: torch.Tensor, table: RotaryTable = table) -> torch.Tensor:
            return rotate(x, table, torch.float32)

        dy, weight = torch.randn(2, 2, 5, 3, dim, generator=torch.Generator().manual_seed(1)).unbind(0)
        found = []
        for form in (lines, fused):
            y = form(x)
            (dx,) = torch.autograd.grad(y, x, dy.requires_grad_(), create_graph=True)
            (ddy,) = torch.autograd.grad(dx, dy, weight.to(dtype))
            _, tangent = torch.func.jvp(form, (x.detach(),), (weight.to(dtype),))
            with torch.no_grad():
                found.append((y, dx, ddy, tangent, torch.func.vmap(form)(x), form(qkv[:, :, 1:4])))
        assert found[1][0].dtype == torch.float32
        assert found[1][0].grad_fn is not None
        for plain, ours in zip(*found, strict=True):
            assert torch.equal(plain, ours), (interleaved, dtype, dim)


def test_gradients_of_16_bit_heads_are_those_of_torchs_lines() -> None:
    """Autograd rounds each product; a rotation without gradients rounds once, with the bits of the lines."""
    table = RotaryEmbedding(8)(torch.arange(5))
    x = torch.randn(2, 5, 3, 8).bfloat16().requires_grad_()
    y, wanted = rotate(x, table), _lines(x, *table, torch.bfloat16, False)
    assert torch.equal(y, wanted)
    assert torch.equal(*(torch.autograd.grad(out, x, torch.ones_like(y))[0] for out in (y, wanted)))
    with torch.no_grad():
        assert torch.equal(rotate(x, table), y)
