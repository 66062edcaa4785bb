"""What a Llama block keeps for backward, counted and bounded: the table of docs/modules.md."""

from __future__ import annotations

import pytest
import torch

from ottava.bench import cpu
from ottava.bench.block_memory import FFN, HEADS, KV_HEADS, TOKENS, WIDTH, blocks


@pytest.mark.slow
def test_a_block_keeps_what_the_table_says() -> None:
    """Bytes a token, added up by hand: inputs of two norms, q, k, v, the output of attention, codes, and `save`."""
    torch.manual_seed(0)
    (case,) = cpu.SUITES["memory"](cpu.Settings())
    kept = next(iter(case.figures.values()))
    share = case.figures["of plain torch with a fused norm"]
    qkv = 2 + 2 * 2 * KV_HEADS / HEADS
    rest = 2 * 128 * 4 / WIDTH + 4 * HEADS / WIDTH + 2 * 4 / WIDTH  # rotary table, attention's sums, rstd
    streams = 2 + qkv + 2 + 2  # x, qkv, attention's result, x behind it
    ffn = FFN / WIDTH
    expected = {
        "plain torch, fused norm": streams + 2 * 2 + 2 * 4 * ffn + rest,
        "tensorwise, save bf16": streams + 3 + (4 + 1) * ffn + rest,
        "tensorwise, save fp8": streams + 3 + (2 + 8 / 128 + 1) * ffn + rest,
        "tensorwise, save recompute": streams + 2 + ffn + rest - 4 / WIDTH,
    }
    for name, bytes_a_token in expected.items():
        assert abs(kept[name] - bytes_a_token) < 0.001, name
    assert share["tensorwise, save fp8"] <= 0.62
    assert share["tensorwise, save bf16"] <= 0.75
    assert share["tensorwise, save recompute"] <= 0.75


def test_all_blocks_compute_the_same() -> None:
    """With one set of weights, within what FP8 rounds: the table compares like with like."""
    x = torch.randn(TOKENS, WIDTH).bfloat16()
    made = dict(blocks())
    plain, ours = made["plain torch, fused norm"], made["tensorwise, save bf16"]
    own = plain.state_dict()
    ours.load_state_dict(
        {"qkv.norm.weight": own["qkv.0.weight"], "qkv.weight": own["qkv.1.weight"], "out.weight": own["out.weight"]}
        | {"mlp.fc1.norm.weight": own["mlp.norm.weight"], "mlp.fc2.weight": own["mlp.down.weight"]}
        | {"mlp.fc1.weight": torch.cat((own["mlp.gate.weight"], own["mlp.up.weight"]))}
    )
    with torch.no_grad():
        y, exact = ours(x).double() - x.double(), plain(x).double() - x.double()
    assert float((y - exact).norm() / exact.norm()) < 0.1
