"""Writes public.json from the table below and the marks of the adapters: `python public.py`."""

from __future__ import annotations

import ast
import json
from pathlib import Path

HERE = Path(__file__).resolve().parent
FILES = {"turn": "encodes3", "back": "encodes3", "pour": "casts3", "times": "products3", "sort": "products3", "wire": "layers3", "look": "layers3", "walk": "layers3"}

# name: (source, truth); a right kernel: (what is different about it,)
TABLE: dict[str, tuple[str, ...]] = {
    "turn_01": ("tenstorrent/tt-metal #51971", "subnormals are encoded a binade too small: below 2**-6 the code is that of half the number"),
    "turn_02": ("tenstorrent/tt-metal #51971", "sticky bits are dropped in subnormals: below 2**-6 a number just above a tie rounds as if it were the tie"),
    "turn_03": ("own", "ties go toward plus infinity, not to even: positive ties round up, negative ones toward zero"),
    "turn_04": ("saturn-vectors #101", "finite numbers from 512 on become NaN where they should saturate at 448"),
    "turn_05": ("ocannl #657", "NaN with the sign bit set is not seen (a signed comparison) and becomes -448"),
    "turn_06": ("own", "rounds twice: first to BF16, then to E4M3; wrong for FP32 numbers close to a tie"),
    "turn_07": ("triton-lang/triton #8322, intel-xpu-backend #3613", "truncates: rounds toward zero"),
    "turn_08": ("own", "overflows too early: everything above 57,344 becomes infinite, where up to 61,440 should round down to 57,344"),
    "turn_09": ("own", "the carry out of the mantissa is lost: 1.9999 rounds to 1 and not to 2 (the exponent is not increased)"),
    "turn_10": ("own", "stochastic rounding takes one random number for all elements of a call"),
    "turn_11": ("own", "stochastic rounding with noise of twice the step: rounds up half as often as it should (biased toward zero)"),
    "turn_12": ("own (threshold cascades of FP4 quantizers)", "ties go away from zero: 0.25, 1.25, 2.5 and 5 round up, where the even code lies below"),
    "turn_13": ("clamp, then torch's cast",),
    "turn_14": ("rounds by adding a large number in fp64, so that the sum ends at the step",),
    "turn_15": ("stochastic rounding, declared; a random number for each element",),
    "turn_16": ("a cascade of thresholds with ties to even",),
    "turn_17": ("overflows to infinity, declared",),
    "back_01": ("intel-xpu-backend-for-triton #7029", "NaN codes decode to 480 and -480"),
    "back_02": ("own", "subnormals are decoded as if they had a hidden one: exponent field 0 gives (1 + m / 8) * 2**-7"),
    "back_03": ("own", "the codes of infinity decode to 65,536"),
    "back_04": ("own (DeepGEMM #417: one 4-bit or 8-bit format dispatched as another)", "E2M1 codes are read as signed 4-bit integers (INT4, two's complement)"),
    "back_05": ("triton-lang/triton #3634", "subnormals are flushed to zero"),
    "back_06": ("shifts into FP16 and multiplies by 256, with a guard for NaN",),
    "pour_01": ("Pushkinist/rMLX #463, ml-explore/mlx #4353", "the exponent of the E8M0 scale is rounded to nearest, not up: about half of the blocks clip their largest numbers"),
    "pour_02": ("ROCm/aiter #3212", "the OCP floor rule: exponent of amax less 2, so amaxes above 6 * 2**e clip; the scale is an octave small there"),
    "pour_03": ("vllm-project/vllm #43557", "the exponent of the scale is that of amax / 6, cut off (floor): one octave too small for nearly all blocks, which clip"),
    "pour_04": ("huggingface/transformers #47030", "the written scale is rounded up to a power of two, the codes belong to the unrounded one: values up to twice as large"),
    "pour_05": ("vllm-project/vllm #20578", "amax without the absolute value: the largest number, so negative outliers clip"),
    "pour_06": ("sgl-project/sglang #36237", "rows of scales are written with a stride padded to 16 bytes: scales behind the first row lie in the wrong place"),
    "pour_07": ("own", "the amax of the last, ragged block reads past the end of the row, into the next row or the neighbouring columns"),
    "pour_08": ("NVIDIA/TransformerEngine #1047", "stale amax: that of the call before"),
    "pour_09": ("Primus #983", "stale cast: kept by address and version counter, so new numbers in the same memory get the old codes"),
    "pour_10": ("own", "scale inverted: writes the scale where its inverse is due"),
    "pour_11": ("pytorch/ao #4229", "scale transposed: the grid of 128 x 128 scales is written K first"),
    "pour_12": ("jax-ml/jax #30467", "codes are made with the block scale before its rounding to E4M3, the rounded one is written"),
    "pour_13": ("radixark/miles #1054", "the block scale is truncated to E4M3 instead of rounded to nearest"),
    "pour_14": ("NVIDIA/TransformerEngine #3342", "a gradient is written as E4M3 bytes into a tensor of E5M2"),
    "pour_15": ("deepseek-ai/DeepGEMM #365", "a row of zeros divides by its amax: its codes are NaN and its scale is zero"),
    "pour_16": ("own (vectorised casts)", "tail not written: columns beyond the last whole 16 keep what the buffer held"),
    "pour_17": ("amax in two passes over tiles of 64 x 64",),
    "pour_18": ("scale_inv = amax / 448, codes by division by it in fp32 (vLLM's way)",),
    "pour_19": ("exponent from the bits of amax, compared with 1.75",),
    "pour_20": ("a row after the other",),
    "pour_21": ("another layout in between: a transposed copy",),
    "times_01": ("mlc-ai/TIRx-kernels #5", "every 128 of K takes the scales of the first of its four blocks of K; right for K up to 128"),
    "times_02": ("sgl-project/sglang #39193", "the scales of a are truncated to powers of two (mantissa cut off)"),
    "times_03": ("tile-ai/tilelang-ascend #1341", "the tail of K beyond the last whole 16 is left out, if K is above 128"),
    "times_04": ("own (split accumulators in low precision)", "accumulates in BF16: the sum is rounded to BF16 after each 64 of K"),
    "times_05": ("NVIDIA/TransformerEngine #2924, ROCm/rocm-libraries #12232", "rows of a's scales are permuted: read in the order of the swizzle of 128 rows (4 x 32); beyond the last row 1 is read"),
    "times_06": ("flashinfer #5173", "alpha applied twice: the tensors' global scales are in the block scales already, and multiply the result again"),
    "times_07": ("own (packed FP4)", "nibbles swapped: even and odd elements of b along K are exchanged"),
    "times_08": ("own (split-K workspaces)", "the partial sums of split-K (four parts) are rounded to BF16 before they are added"),
    "times_09": ("AMD-AGI/Primus-Turbo #349", "columns wrap: the padding of the last ragged tile of 64 columns overwrites the first columns with zeros (N above 64)"),
    "times_10": ("AMD FNUZ checkpoints", "b in E4M3FN is read as E4M3FNUZ (bias 8): results are half as large"),
    "times_11": ("deepseek-ai/DeepGEMM #268", "if M is below 64 all rows take the scales of row 0"),
    "times_12": ("own (FP16 accumulators)", "the result passes through FP16: above 65,504 it becomes infinite, below 2**-14 it loses bits, and all are rounded twice"),
    "times_13": ("own", "the scale byte 255 counts as 2**128 and not as NaN"),
    "times_14": ("ROCm/FlyDSL #1107", "writes past the end of the output: rows up to the next multiple of 8"),
    "times_15": ("split-K in fp32, summed as a tree",),
    "times_16": ("sums from the end of K to its start",),
    "times_17": ("fp32 sums of 128, scaled and promoted as DeepGEMM does it",),
    "times_18": ("tiles of 16 x 16, operands exchanged, fp64 between blocks",),
    "times_19": ("whole sums of codes of 16, scales fused behind them",),
    "times_20": ("an FMA for each k, the result written from a transposed layout",),
    "sort_01": ("vllm-project/vllm #41769", "one group's scale for all groups: the scales of weight 0"),
    "sort_02": ("own", "empty groups are not counted: groups behind an empty one take the weight of the group before"),
    "sort_03": ("own", "tiles of 16 rows take the group of their first row: wrong behind a boundary that is no multiple of 16"),
    "sort_04": ("flashinfer-ai/flashinfer #3650", "one NaN row spoils the other rows of its tile of 32"),
    "sort_05": ("pytorch/FBGEMM #4314, AMD-AGI/Primus-Turbo #397", "groups with fewer than eight rows are not written"),
    "sort_06": ("own", "ends are read as sizes: the second group and all behind begin and end too late"),
    "sort_07": ("NVIDIA/TransformerEngine #2924", "the scales of a group's rows are read as if every group began at a multiple of 32 rows"),
    "sort_08": ("all rows by all weights, then a choice",),
    "sort_09": ("tiles of 32 rows, the last group first",),
    "sort_10": ("one batched product padded with zeros",),
    "wire_01": ("pytorch/ao #4229", "in dx the grid of the weight's scales is not transposed (its memory is read in the old order)"),
    "wire_02": ("Primus #1010", "dw is computed without a cast: a silent fallback to high precision"),
    "wire_03": ("own", "in dx the codes of the weight are multiplied by the scale of x, not by that of the weight"),
    "wire_04": ("deepseek-ai/DeepGEMM #10", "in dw the gradient has scales of its rows (along N) where the sum runs over tokens: the cast for dx is reused"),
    "wire_05": ("own (main_grad buffers that are not cleared)", "dw is added to that of the call before with a weight of the same shape"),
    "wire_06": ("one cast a tensor, codes multiplied in fp32, scales behind",),
    "wire_07": ("tokens in two halves, dw with operands exchanged",),
    "look_01": ("own", "causal mask off by one: the diagonal is masked, too (row 0 sees itself)"),
    "look_02": ("own", "dv takes unnormalised probabilities: exp(score - maximum) is not divided by its sum"),
    "look_03": ("Dao-AILab/flash-attention #2577", "the accumulator is not rescaled when a later tile of 16 keys has a larger maximum; only o is wrong"),
    "look_04": ("own", "dq lacks the factor 1 / sqrt(D)"),
    "look_05": ("NVIDIA/TransformerEngine #3248", "the causal mask works on tiles of 16 only: inside a diagonal tile queries see later keys"),
    "look_06": ("vllm-project/vllm #51363", "the scale of v is not applied in o"),
    "look_07": ("online softmax over tiles of 32 keys in fp32, and a backward from its sums",),
    "look_08": ("P and dS are rounded to the dtype of q before their products, as in FlashAttention",),
    "walk_01": ("own", "the bias correction is one step ahead (step + 1)"),
    "walk_02": ("own", "eps is added under the root"),
    "walk_03": ("own (8-bit and 16-bit Adam: v underflows)", "the second moment is stored in FP16 and not in BF16: it underflows to zero for gradients below about 1e-3, and the step is far too large"),
    "walk_04": ("own (vectorised steps)", "tail not updated: elements beyond the last whole 64 stay as they are"),
    "walk_05": ("own", "rounds twice: the decayed parameter is rounded to BF16 before the update is subtracted"),
    "walk_06": ("the bias corrections are folded into the rate and eps; the sum in fp64",),
}


def marks() -> dict[str, tuple[str, dict[str, object]]]:
    """(kind, what) of each adapter, read from the decorators."""
    found = {}
    for file in sorted(set(FILES.values())):
        for node in ast.parse((HERE / f"{file}.py").read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.decorator_list:
                call = node.decorator_list[0]
                found[node.name] = (ast.literal_eval(call.args[0]), {k.arg: ast.literal_eval(k.value) for k in call.keywords})
    return found


def main() -> None:
    found = marks()
    assert set(found) == set(TABLE), set(found) ^ set(TABLE)
    lines = []
    for name, row in TABLE.items():
        kind, what = found[name]
        file = FILES[name.split("_")[0]]
        clean = len(row) == 1
        entry = {"name": name, "adapter": f"benchmarks/blind/kernels3/{file}.py:{name}", "kind": kind, "what": what, "clean": clean}
        source, truth = ("own", "") if clean else row
        entry |= {"source": source, "truth": truth, "cause": truth} | ({"way": row[0]} if clean else {})
        lines.append(json.dumps(entry))
    (HERE / "public.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
