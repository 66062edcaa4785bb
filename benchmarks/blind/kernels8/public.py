"""Writes public.json: for each kernel its kind, what it says of itself, whether it is right, and why not. `python public.py`."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

FILES = ("codes8", "casts8", "products8", "layers8")
OWN = "own"
RIGHT = {
    "fern_01": "the rung is the sum of seven comparisons in FP32, with and without the middle itself in turn",
    "fern_06": "integers: half a step and the last bit are added to the bits of FP32; below the smallest normal number 128 is added and the FP32 adder rounds",
    "fern_10": "the bits are shifted into an FP16 number, which is multiplied by 256; NaN is put back",
    "moss_02": "tile by tile, amax from the largest and the smallest number, torch's own conversion behind a clamp, written in place",
    "moss_08": "the byte is the exponent field of the amax minus 8, plus one if the mantissa is above 0.75",
    "moss_13": "block by block along K; the rung of the smallest distance, even rungs before odd ones; block scales by torch's own conversion",
    "flint_02": "even columns of K before odd ones, the result transposed, the weight's scale in the main loop and the other in the epilogue",
    "flint_06": "FP32 partial products of 32, scaled one by one, added as a tree",
    "flint_12": "blocks of K from the last to the first, odd and even ones in an FP32 accumulator each, operands scaled before the product",
    "flint_15": "every group multiplies all rows, and a mask of rows chooses",
    "flint_19": "rows look up their group by a binary search, are gathered and scattered; the weights lie as one tall matrix",
    "larch_02": "tokens in pieces of 24, products transposed, dw added piece by piece",
    "larch_05": "all three products transposed or in pieces of 40 of N, dw first",
    "larch_09": "tiles of 24 keys in FP32 with a running maximum and sum; the backward takes its probabilities from the stored log-sum-exp",
    "larch_12": "head by head, keys down and queries across, powers of two instead of e",
    "larch_16": "moments in FP64 by lerp, both corrections folded into the step size and eps",
}
WRONG = {
    "fern_02": ("vllm-project/vllm #55346 (class: fmin and fmax drop NaN)", "NaN becomes -448, since the clamp takes the larger and the smaller number as fmaxf and fminf do"),
    "fern_03": ("NVlabs/cutile-rs #250", "truncates toward zero instead of rounding to the nearest number"),
    "fern_04": ("triton-lang/triton #3634 (class: FNUZ for OCP)", "writes codes of E4M3FNUZ (bias 8, clamped to 240, NaN is 0x80): read as E4M3 all numbers are twice as large"),
    "fern_05": ("sgl-project/sglang #40581", "ties go away from zero instead of to the even code"),
    "fern_07": ("triton-lang/triton #7382", "numbers below 2**-6 become zero: no subnormal code is written"),
    "fern_08": ("class: overflow carries into the sign", "magnitudes from 7 on do not saturate at 6: the rung is carried to 8, so they become -0"),
    "fern_09": ("class: noise is added before a rounding to nearest instead of a truncation", "stochastic: the random share is added and the sum rounded to nearest instead of down, so the mean is half a step too large in magnitude and numbers of the format itself move up"),
    "fern_11": ("class: E4M3FN's NaN decoded as a number", "the codes 0x7F and 0xFF decode to 480 and -480 instead of NaN"),
    "fern_12": ("ooples/AiDotNet.Tensors #801", "subnormal codes are decoded with the hidden one and the exponent of their field: (1 + m / 4) * 2**-15 instead of m / 4 * 2**-14; zero is right"),
    "fern_13": ("class: the sign of a nibble looked for in the byte's highest bit", "the sign is taken from bit 7 of the byte instead of bit 3, so negative codes decode as positive"),
    "moss_01": ("class: scale and scale_inv exchanged", "the stored scale is the multiplier 448 / amax instead of its inverse; codes are right"),
    "moss_03": ("class: one limit for both formats", "gradients in E5M2 are scaled to 448, the limit of E4M3, instead of 57344"),
    "moss_04": ("class: the amax of a row from its first tile only", "the amax of a row is that of its first 128 columns"),
    "moss_05": ("class: the index of the last block is rounded down", "the last block of a row whose K is no multiple of 128 has the scale of the block before it, for codes and stored"),
    "moss_06": ("class: one of two warps is left out of the reduction", "the amax of a 128x128 block is that of its first 64 rows"),
    "moss_07": ("class: DeepGEMM's clamp of amaxes at 1e-4 in a recipe that has none", "amaxes below 1e-4 are taken as 1e-4"),
    "moss_09": ("ml-explore/mlx #4353", "the exponent is floor(log2(amax)) - 8, as the OCP text has it, instead of rounded up: amaxes above 448 times a power of two saturate under half the scale"),
    "moss_10": ("deepseek-ai/DeepGEMM #33 (class: the layout of scales)", "the scale bytes are written in the order of their transpose"),
    "moss_11": ("class: the tail of K is not stored", "codes behind the last whole block of 32 along K are not written"),
    "moss_12": ("class: codes by a scale that is not the stored one", "codes are made with the block's scale before it is rounded to E4M3; the stored scale is the rounded one"),
    "moss_14": ("jax-ml/jax #30467", "the stored scale is the block's E4M3 number alone: the tensor's number is not multiplied in"),
    "moss_15": ("NVIDIA/TransformerEngine #123 (class: scale and scale_inv of different calls)", "codes are made with the scale of the call before, and the scale of this call is stored; the first call is right"),
    "moss_16": ("vllm-project/vllm #49092", "x is read from its first number on as if it were contiguous, whatever its strides"),
    "flint_01": ("class: a wrong pointer for the second scale", "the product is multiplied by the square of a's scale; b's scale is not used"),
    "flint_03": ("class: the vectors of scales are exchanged", "rows of the result are multiplied by the scales of b and columns by those of a (indices modulo their number)"),
    "flint_04": ("NVIDIA/TensorRT-LLM #12835 (class: the number of K tiles is rounded down)", "what lies behind the last whole 32 of K is left out of the sum"),
    "flint_05": ("mlc-ai/TIRx-kernels #5", "in each run of four blocks of 128 along K, a's scale is that of the first"),
    "flint_07": ("class: the accumulator has the dtype of the result", "the running sum is rounded to BF16 after each 128 of K"),
    "flint_08": ("triton-lang/triton #5197", "neighbouring codes of a (2 i and 2 i + 1 along K) are exchanged, and b's are not"),
    "flint_09": ("class: a split of K that ends within a block", "K is split in halves, and the second half counts blocks of 16 for scales from its own start: wrong where half of K is no multiple of 16"),
    "flint_10": ("ROCm/aiter #3457 (class: a split of K into a result that nobody zeroed)", "both halves of K are added to what lies in out, which is not zeroed"),
    "flint_11": ("class: the tail of N is not stored", "columns behind the last whole 8 of N are not written"),
    "flint_13": ("class: ends taken as sizes", "ends are read as sizes: group g goes to the sum of ends up to g, so rows behind the first group go to groups that are too early"),
    "flint_14": ("class: one group for a tile of rows, as in layouts whose groups are padded", "each 16 rows, counted from row 0, are multiplied by the weight of the group of their first row"),
    "flint_16": ("vllm-project/vllm #54974 (class: one scale for several weights)", "all groups have the weight scale of group 0"),
    "flint_17": ("huggingface/kernels-community #1154 (class: a tile stores beyond its group)", "a group includes the row at its end, and groups run from the last to the first: the first row behind each group that is not empty is multiplied by that group's weight"),
    "flint_18": ("sgl-project/sglang #27926", "a's scales are indexed by the row within the group instead of the row of a"),
    "larch_01": ("class: one format for both passes", "the gradient is cast to E4M3 under 448 instead of E5M2: dx and dw"),
    "larch_03": ("class: the row-wise cast is used transposed for wgrad", "dw is made of the casts of x and grad in blocks along their features instead of those of their transposes along the tokens"),
    "larch_04": ("class: (s, b) flattened as (b, s)", "for dw the first two dimensions of grad are exchanged before it is flattened, if there are more than two"),
    "larch_06": ("NVIDIA/TransformerEngine #2936", "dw is added to the dw of all calls before with a weight of this shape"),
    "larch_07": ("AMD-AGI/Primus-Turbo #505", "dx is the sum of two halves of N that were each rounded to BF16"),
    "larch_08": ("Dao-AILab/flash-attention #2651 (class: the backward without softmax_scale)", "dq is not multiplied by the softmax scale"),
    "larch_10": ("class: a causal mask of whole tiles", "the causal mask is by tiles of 16: within its own tile a query sees the keys behind it"),
    "larch_11": ("class: padded keys are not masked", "keys are padded with zeros to a multiple of 32, and these count in the sum of the softmax with the score 0"),
    "larch_13": ("class: the gradient of the softmax without its row sum", "the row sum of grad times o is not subtracted: dq and dk"),
    "larch_14": ("class: eps within the root", "eps is added within the square root, behind the correction"),
    "larch_15": ("class: the step is counted twice", "both bias corrections use step + 1"),
    "larch_17": ("nntrainer/nntrainer #3565", "the weight decay is added to the gradient (L2) instead of decoupled"),
    "larch_18": ("nntrainer/nntrainer #3565", "the first moment is rounded to BF16 before it is stored and used, though the moments are said to be FP32"),
}


def main() -> None:
    here = Path(__file__).resolve().parent
    sys.path.insert(0, str(here))
    lines = []
    for file in FILES:
        for name, run in vars(importlib.import_module(file)).items():
            if not hasattr(run, "adapter_kind"):
                continue
            entry = {"name": name, "adapter": f"benchmarks/blind/kernels8/{file}.py:{name}", "kind": run.adapter_kind, "what": run.adapter_what, "clean": name in RIGHT}
            source, truth = (OWN, "") if name in RIGHT else WRONG[name]
            entry |= {"source": source, "truth": truth, "cause": truth}
            if name in RIGHT:
                entry["way"] = RIGHT[name]
            lines.append(json.dumps(entry))
    assert len(lines) == len(RIGHT) + len(WRONG)
    (here / "public.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
