"""Writes public.json: for each kernel its kind, what it says of itself, whether it is right, and why not. `python public.py`."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

FILES = ("codes7", "casts7", "products7", "layers7")
OWN = "own"
RIGHT = {
    "teal_02": "one and a half times a power of two is added and taken away, so that the FP32 adder rounds; codes from the bits of the result",
    "teal_05": "codes become the upper byte of FP16 numbers",
    "teal_08": "declared stochastic: 24 random bits against the number's share of its step",
    "rook_02": "blocks from the last to the first; amax from the largest and the smallest number, exponent by a search in a table, codes by counting the middles passed",
    "rook_06": "the amax over pieces of 1000; codes by division by the stored scale",
    "rook_11": "tile by tile, amax of row amaxes, torch's own conversion behind a clamp, written in place",
    "crane_02": "split-K in three in an FP32 workspace, added as a tree; both scales in the epilogue",
    "crane_07": "whole numbers in each block of 16, fused multiply-add with the product of the two scales in FP32",
    "crane_10": "tiles of 32 x 48; blocks of 128 from the last to the first in FP32, promoted with their scales; columns gathered",
    "crane_16": "tiles of 16 rows; one that lies in several groups is computed for each and stored under a mask",
    "crane_19": "groups from the last to the first, blocks of 32 along K, each scaled and added in FP32",
    "swift_02": "chunks of 64 along K in FP32, scales of rows and columns in the epilogue",
    "swift_06": "tiles of 128 tokens from the last to the first; the weight's gradient is added up over them",
    "swift_09": "online softmax over tiles of 32 keys, backward from the log-sum-exp, keys from the last tile on",
    "swift_13": "gradients by autograd of a log-softmax in FP64",
    "swift_16": "lerp and addcdiv in FP32, both moments in one buffer, the correction of the second in the root",
}
WRONG = {
    "teal_01": ("tile-ai/tilelang-metax #140",
                "every number whose exponent field is 15 saturates to 448: results from 256 to 416 become 448, as if all of the top binade were NaN and overflow"),
    "teal_03": ("FlashML-org/FreeToken #85",
                "FP32 is first truncated to FP16 and then rounded to E4M3: numbers a little above the middle of two codes fall onto it and go to the even code below (double rounding); BF16 is right"),
    "teal_04": ("ROCm/aiter #3992", "ties go away from zero instead of to the even code: 0.25, 1.25, 2.5 and 5 become 0.5, 1.5, 3 and 6"),
    "teal_06": ("ROCm/vllm #381", "the clamp before the conversion is missing: finite numbers above 464 become NaN instead of saturating at 448"),
    "teal_07": ("PTO-ISA/SuperNPUBench #49", "numbers below the smallest subnormal number 2**-9 are flushed to zero: those between 2**-10 and 2**-9 should round up to 2**-9"),
    "teal_09": ("ROCm/llvm-project #3275",
                "stochastic rounding adds the noise to the mantissa alone and the carry is lost: where the mantissa rounds up past its end the exponent does not grow, so numbers between 15/8 and 2 times a power of two become that power instead of twice it"),
    "teal_10": ("tile-ai/tilelang #2704", "codes with exponent field 0 are decoded as normal numbers with a leading one: zero becomes 0.5 and the subnormal 0.5 becomes 0.75"),
    "teal_11": ("ROCm/rocm-systems #10591",
                "the shift of the mantissa is taken modulo 64: numbers far below the smallest subnormal, of magnitudes from 2**-80 to 2**-77, come out 2**64 times as large instead of zero"),
    "teal_12": ("tile-ai/tilelang #2710", "the NaN codes 0x7F and 0xFF are decoded as the numbers 480 and -480"),
    "teal_13": ("vllm-project/vllm #7210", "E4M3FN codes are read as E4M3FNUZ (exponent bias 8): every number is half as large, -0 becomes NaN and NaN becomes 240"),
    "rook_01": ("meta-pytorch/tritonbench #1145",
                "x is multiplied by the stored scale amax / 448 instead of its inverse, so it is scaled in the wrong direction and the codes are far too small; the stored scale is right"),
    "rook_03": ("ModelTC/LightLLM #943", "the amax of a row is the maximum of the signed values, fabs is missing: rows whose largest magnitude is negative get too small a scale and saturate"),
    "rook_04": ("sgl-project/sglang #8290", "the loop for the amax goes on by two and sees only the even columns: blocks whose largest magnitude is in an odd column may get too small a scale"),
    "rook_05": ("ml-explore/mlx #4353", "the E8M0 exponent is log2(amax / 448) rounded to nearest instead of up: about half of the blocks get half the scale and their largest numbers saturate"),
    "rook_07": ("pytorch/ao #4725", "the amax is rounded to BF16 before the scale's exponent is taken, so an FP32 amax near 6 times a power of two gets the exponent beside the right one; BF16 inputs are right"),
    "rook_08": ("NVIDIA/TransformerEngine #2972", "the tensor's scale is amax / (6 * 256) instead of amax / (6 * 448): block scales use E4M3 only up to 256 and are rounded elsewhere"),
    "rook_09": ("NVIDIA/Model-Optimizer #2243", "the elements are divided by the block's scale amax / 6 before it was rounded to E4M3, while the rounded scale is stored"),
    "rook_10": ("sgl-project/sglang #30900", "the scale is amax / 224 (the bound of E4M3FNUZ) instead of amax / 448: every stored scale is twice as large and every code half as large"),
    "rook_12": ("pytorch/FBGEMM #2919", "the codes are written with the strides of x: for a transposed x they lie transposed in the contiguous result; the scales are right"),
    "rook_13": ("sgl-project/sglang #8543", "vectors of 16 without a tail: where K is no multiple of 16 the last columns are neither written nor seen by the amax"),
    "rook_14": ("tile-ai/tilelang #3024", "the clamp drops NaN: max(x, -57344) of NaN is -57344, and the amax ignores it, so NaN becomes the lowest number instead of staying NaN"),
    "rook_15": ("InternLM/lmdeploy #3652", "an amax of zero is not guarded: blocks of zeros get the scale 448 / 0, their codes become 0 * inf = NaN, and the stored scale 0"),
    "rook_16": ("unslothai/unsloth #8953", "the grid of scales is stored transposed (columns of blocks first); codes are right; shows where there are several blocks both along M and along K"),
    "crane_01": ("pytorch/FBGEMM #6159", "the scales of the trailing partial block are never applied: where K is no multiple of 128 the products behind the last whole block are added unscaled"),
    "crane_03": ("NVIDIA/cutlass #3596",
                 "the scales of b are multiplied in place by those of a and reused: in each tile of 256 rows the second 128 rows are multiplied by the scale of the row 128 above as well"),
    "crane_04": ("flashinfer-ai/flashinfer #2084", "a's scale is multiplied by b's in place: the result is right, but the caller's scale_inv_a is changed, so a second call with it is wrong"),
    "crane_05": ("AMD-AGI/Primus-Turbo #505", "split-K keeps the partial sums of its four slices in BF16 instead of FP32 before they are added; shows from K = 128 on"),
    "crane_06": ("ROCm/aiter #862", "split-K adds its partial sums to the output without clearing it first: the result contains what the buffer held before; shows from K = 256 on"),
    "crane_08": ("NVIDIA/TensorRT-LLM #12835", "the number of tiles along K is rounded down: the last K mod 64 columns are left out of the sum, and for K below 64 the result is zero"),
    "crane_09": ("llvm/llvm-project #214919", "a scale byte of 255 is decoded as infinity (255 << 23) instead of NaN, so results are infinite where they should be NaN"),
    "crane_11": ("ROCm/aiter #2900", "a's scales are read with a stride padded to a multiple of 8 blocks that the buffer does not have: rows from 32 on get scales of later rows unless K / 32 is a multiple of 8"),
    "crane_12": ("deepseek-ai/DeepGEMM #37", "the accumulator keeps 14 bits: after each 32 products along K the sum is truncated to 14 significant bits (fast accumulation of Hopper)"),
    "crane_13": ("huggingface/kernels-community #1153",
                 "the last tile of 128 columns is not masked at N: products with the next group's weights are stored past N, over the first columns of the following rows of the group; not in the last group, and not where N is a multiple of 128"),
    "crane_14": ("NVIDIA/TransformerEngine #1128", "all groups use the weight scales of group 0; only the first group is right"),
    "crane_15": ("pytorch/FBGEMM #4314", "ends are taken for sizes of the groups: from the second group on, rows go to the wrong group"),
    "crane_17": ("deepseek-ai/DeepGEMM #38", "groups without rows do not advance the weight: after an empty group every group uses the weight and the scale of the one before"),
    "crane_18": ("NVIDIA/TransformerEngine #2743", "a's scales are indexed by the row within the group instead of the row of a: from the second group on each row is scaled by that of a row of the groups before"),
    "swift_01": ("NVIDIA/TransformerEngine #3342", "the bytes of the E5M2 gradient are read as E4M3 in both backward GEMMs; y is right, dx and dw are far too small"),
    "swift_03": ("NVIDIA/TransformerEngine #1596", "the transposed cast of the weight is cached by its address and never renewed: after the weight was updated in place dx still uses the old one, y the new one"),
    "swift_04": ("NVIDIA/TransformerEngine #1490", "dw uses x as it was cast for the forward pass, in blocks of 128 along K, instead of a cast in blocks along the tokens (its own contraction)"),
    "swift_05": ("AMD-AGI/Primus #1010", "the GEMM of the weight's gradient silently falls back to BF16: dw comes from x and grad without any cast to FP8"),
    "swift_07": ("pytorch/pytorch #190449", "the scales of x are not applied in dw: its columns are off by powers of two, as if scale_inv of the second operand were 1"),
    "swift_08": ("tenstorrent/tt-metal #48700", "causality holds only between blocks of 32: a query sees all keys of its own block, those behind it too"),
    "swift_10": ("Dao-AILab/flash-attention #2577",
                 "when the running maximum rises by less than 8 binades the accumulator of o is not rescaled, but the sum of the softmax is: o is wrong from S = 33 on, and through it dq and dk"),
    "swift_11": ("tile-ai/tilelang #547", "dq is added up in a buffer that is not cleared between calls: from the second call of a shape on, dq contains that of the calls before"),
    "swift_12": ("Dao-AILab/flash-attention #2109", "o is not multiplied by the inverse scale of v (its descale is missing in the epilogue), so o is 448 / amax times too large; the gradients are right"),
    "swift_14": ("nntrainer/nntrainer #3527", "AdamW works like Adam: the weight decay is added to the gradient (L2) and goes through the moments instead of shrinking the parameter"),
    "swift_15": ("bitsandbytes-foundation/bitsandbytes #2040", "the weight decay is applied after the update instead of before it, so the update is shrunk by 1 - lr * weight_decay too"),
    "swift_17": ("ZhangZhiPku/cutile-examples #4", "the bias corrections are 1 - beta instead of 1 - beta**step: right in the first step only; from the second on the updates are too large, about twice at step 10"),
    "swift_18": ("Nerogar/OneTrainer #996", "the weight decay is applied to the BF16 parameter and rounded before the update: p * (1 - lr * weight_decay) rounds back to p, so nothing decays"),
}


def main() -> None:
    here = Path(__file__).resolve().parent
    sys.path.insert(0, str(here))
    lines = []
    for file in FILES:
        module = importlib.import_module(file)
        for name, run in vars(module).items():
            if not hasattr(run, "adapter_kind"):
                continue
            entry = {"name": name, "adapter": f"benchmarks/blind/kernels7/{file}.py:{name}", "kind": run.adapter_kind, "what": run.adapter_what, "clean": name in RIGHT}
            source, truth = (OWN, "") if name in RIGHT else WRONG[name]
            entry |= {"source": source, "truth": truth, "cause": truth}
            if name in RIGHT:
                entry["way"] = RIGHT[name]
            lines.append(json.dumps(entry))
    assert len(lines) == len(RIGHT) + len(WRONG)
    (here / "public.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
