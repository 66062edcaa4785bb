"""Writes public.json: for each kernel its kind, what it says of itself, whether it is right, and why not. `python public.py`."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

FILES = ("codes6", "casts6", "products6", "layers6")
OWN = "own"
RIGHT = {
    "wren_02": "integers: half of the last kept place and its parity are added, then the rest is shifted out, subnormal codes by the same path",
    "wren_08": "declared stochastic: up if a uniform draw lies below the number's share of its step",
    "wren_10": "seven bits moved into a FP16 number, times 256",
    "finch_04": "the amax from the smallest and the largest number; codes by division by the stored scale",
    "finch_10": "strips of 16 rows; codes by the nearest of eight sizes, even codes first",
    "finch_17": "from the last block to the first, amaxes of halves, ldexp, torch's own conversion behind a clamp, each block written into its place",
    "heron_04": "tiles of 48 columns from the last to the first; blocks of K in FP32, each promoted with its scales",
    "heron_11": "split-K in four in an FP32 workspace, added as a tree",
    "heron_12": "rank-one updates in FP32 along K; both scales in the epilogue",
    "heron_18": "rows look up their group and are gathered and scattered, the last group first; chunks of 96 along K in FP32",
    "heron_19": "every row times every group's weight, then each row keeps its own; scales in the epilogue",
    "plover_06": "keeps the weight's casts as long as the weight equals a copy bit for bit",
    "plover_07": "one GEMM for all three products: sums of 32 in FP32, the last block first",
    "plover_13": "split keys: three softmaxes merged by the logarithms of their sums; the backward one query after the other",
    "plover_14": "powers of two with log2(e) in the scores; the backward from log2 of the sums in tiles of 40 keys",
    "plover_19": "chunks of 64, moments in one tensor, FP64 in between, bias corrections as one quotient that multiplies eps, too",
}
WRONG = {
    "wren_01": ("tenstorrent/tt-metal #51971", "the last bit of the mantissa is lost: normal numbers with an odd mantissa get the even code below, toward zero (9 becomes 8), as if E4M3 had two bits"),
    "wren_03": ("openvinotoolkit/openvino #30057", "subnormal results are rounded twice: below 2**-6 numbers are rounded to four significant bits first, then to the step of the subnormal codes, so some go to the wrong neighbour"),
    "wren_04": ("stillwater-sc/universal #1302", "infinities are coded as zero instead of saturating or NaN"),
    "wren_05": ("stillwater-sc/universal #1133", "truncation instead of rounding: the lower byte of the FP16 number is cut off, so all numbers are rounded toward zero"),
    "wren_06": ("tenstorrent/tt-metal #51971", "the subnormal number of E2M1, 0.5, is never used: what should be 0.5 (0.25 to 0.75) is coded as 0"),
    "wren_07": ("Nerogar/OneTrainer #994", "no stochastic rounding though it is declared: the drawn codes are overwritten with those of nearest rounding"),
    "wren_09": ("tinygrad/tinygrad #18274", "the top exponent is read as IEEE's: codes 0x78 to 0x7E (256 to 448) decode as infinity and NaN"),
    "wren_11": ("ROCm/aiter #640", "decoded as E4M3FNUZ (exponent bias 8 instead of 7): all numbers are half as large, -0 is NaN, and NaN is a number"),
    "finch_01": ("microsoft/microxcaling #4", "the scale's exponent is rounded down (floor(log2(amax)) - 8) instead of up: where the amax lies above 1.75 times a power of two the scale is half as large, and the largest numbers saturate"),
    "finch_02": ("pytorch/ao #4725", "amaxes are rounded to BF16 before the scale's exponent is taken: an amax just above 1.75 times a power of two gets a scale half as large, and its number saturates"),
    "finch_03": ("pytorch/ao #4186", "masked rows store their scales, too: where M is no multiple of 16 they land in the next column of scales, so the first rows of all columns but the first have the scale 1; codes are right"),
    "finch_05": ("AMD-AGI/Primus-Turbo #306", "the amax is that of the first 8192 numbers only: in larger tensors the scale may be too small, and numbers saturate"),
    "finch_06": ("ROCm/aiter #5177", "the scale is made for 448, the largest number of E4M3, but the codes are E5M2 with 57344: the stored scale is 128 times too large"),
    "finch_07": ("ml-explore/mlx #3557", "from the third block of a row on the amax is taken over 32 columns instead of 16: two neighbouring blocks share the larger scale"),
    "finch_08": ("jax-ml/jax #30467", "the tensor's scale is left out when the codes are made: x is divided by the block's E4M3 scale only, so most codes are 0 or at the limit; the stored scales are right"),
    "finch_09": ("radixark/miles #1054", "the block's E4M3 scale is rounded down (truncated) instead of to nearest: about half of the stored scales are one E4M3 step too small, and the largest numbers of their blocks saturate at 6"),
    "finch_11": ("DeepWok/mase #321", "blocks run on over the end of a row: the matrix is cut into 32 numbers as one list, so where K is no multiple of 32 amaxes mix the end of a row with the start of the next"),
    "finch_12": ("NVIDIA/TensorRT-LLM #16569", "the amax ignores strides: it is taken over the memory behind x's first number as if x were contiguous, so views (every second column, columns of a wider matrix) get the amax of other numbers"),
    "finch_13": ("Azure/MS-AMP #17", "the amax is not reset between calls: it is the largest of all calls so far, so after larger numbers the scale is too large"),
    "finch_14": ("ROCm/vllm #381", "the multiplier (448 / amax) is stored where its inverse (amax / 448) belongs; the codes are right"),
    "finch_15": ("NVIDIA/Model-Optimizer #381", "the scaled numbers are rounded to BF16 before the cast where x is BF16: double rounding, so some codes are the wrong neighbour; FP32 is right"),
    "finch_16": (OWN, "x is scaled in place: codes and scales are right, but the caller's tensor holds the scaled numbers afterwards, where it is contiguous"),
    "heron_01": ("sgl-project/sglang #20819", "the scales do not advance along K: those of the first block of 128 are used for all blocks, of both operands"),
    "heron_02": ("NVIDIA/cutlass #3596", "the buffer with b's scales is multiplied by a's scales in place and used again: rows from 128 on are also multiplied by the scales of a of the rows 128, 256 and so on before them"),
    "heron_03": ("modular/modular #7165", "split-K: the four partial sums are rounded to BF16 and added in BF16, instead of in FP32"),
    "heron_05": ("huggingface/kernels-community #1153", "the tail of K is not masked: where K is no multiple of 32 the last tile reads on into the next row of a and b, and adds their products"),
    "heron_06": ("Comfy-Org/comfy-kitchen #41", "the two 4-bit codes of a byte are swapped in b: columns 2j and 2j + 1 of K change places"),
    "heron_07": ("ROCm/aiter #3367", "the scale of a is ignored: it counts as 1"),
    "heron_08": ("NVIDIA/cutlass #3394", "the row of b's scales is chosen by the tile's row of out (M) instead of its column (N): columns beyond the first 128 get the scales of another block, and so do rows beyond the first 128 where N is larger than 128, too"),
    "heron_09": ("linkedin/Liger-Kernel #185", "the sum of products passes through FP16 before it is scaled: it is rounded to 11 bits, and beyond 65504 it is infinite"),
    "heron_10": ("ROCm/rocm-libraries #9055", "split-K adds to an output that is not zeroed: from K = 256 on what the buffer held before is part of the result (NaN where it held NaN)"),
    "heron_13": ("AMD-AGI/Primus-Turbo #397", "too few tiles are launched: as many as all rows need together instead of each group for itself, so with ragged groups the last tiles' rows are never written"),
    "heron_14": ("deepseek-ai/DeepGEMM #450", "a tile of 16 rows takes the weight of its first row's group: where a group ends within a tile, the rows behind it are multiplied by the weight of the group before"),
    "heron_15": ("vllm-project/vllm #54974", "the weight scale of the first group is used for all groups"),
    "heron_16": (OWN, "ends are read as sizes: a group begins at the sum of the ends before it, so from the end of the first group on rows have the weight of another group or are never written"),
    "heron_17": ("vllm-project/vllm #44110", "a square weight (N = K) is not transposed: the layout is guessed from the shape, so the product is with b instead of its transpose"),
    "plover_01": ("NVIDIA/TransformerEngine #1596", "dx is made with a stale weight: its transposed cast is cached by address and version, so after a write that torch does not count dx uses the old weight; y is right"),
    "plover_02": ("NVIDIA/TransformerEngine #3342", "for dw the E5M2 codes of the gradient are read as E4M3; y and dx are right"),
    "plover_03": ("NVIDIA/TransformerEngine #3244", "for dw x is taken as it was cast for the forward, with blocks along K, instead of being cast along the tokens"),
    "plover_04": ("NVIDIA/TransformerEngine #2911", "the last tokens are left out of dw where their number is no multiple of 16"),
    "plover_05": ("mingti-org/phyai #32", "x of three dimensions gets one scale for each leading index, that of its first token, instead of one for each token: larger tokens saturate in y; two dimensions and the gradients are right"),
    "plover_08": ("bytedance-iaas/sglang #485", "the softmax scale is made from the padded head: 1 / sqrt of D rounded up to a multiple of 32; only such D are right"),
    "plover_09": ("tenstorrent/tt-metal #32502", "padded keys are not masked: where S is no multiple of 32 keys of zeros take part in the softmax with the score 0"),
    "plover_10": ("vllm-project/vllm #51363", "the inverse scale of v is missing in o: o is too large or too small by the scale of q, k and v (448 / amax); the gradients are right"),
    "plover_11": (OWN, "when the running maximum grows, the accumulated o is not rescaled (only the sum is): with more than 32 keys o is too large; the gradients are right"),
    "plover_12": ("triton-lang/triton #8565", "the backward assumes a causal mask: dk and dv leave out the queries before the key's block of 16; o and dq are right"),
    "plover_15": ("flagos-ai/FlagGems #4989", "L2 instead of decoupled weight decay: the decay is added to the gradient and goes through the moments (Adam instead of AdamW)"),
    "plover_16": ("bitsandbytes-foundation/bitsandbytes #2010", "the decay comes after the step: the step itself is decayed, too, by lr * weight_decay"),
    "plover_17": ("HomebrewML/HeavyBall #11", "parameters of one shape share their moments: the state is kept by shape instead of in the given dict, so a new parameter begins with those of another"),
    "plover_18": ("karpathy/convnetjs #70", "the bias corrections multiply instead of dividing: m is multiplied by 1 - beta1**step, and v by 1 - beta2**step; the first step comes out right, later ones too small or too large"),
}


def main() -> None:
    """One line an entry, in the order of the files."""
    lines = []
    for file in FILES:
        module = importlib.import_module(file)
        for name, f in vars(module).items():
            if not hasattr(f, "adapter_kind"):
                continue
            entry = {"name": name, "adapter": f"benchmarks/blind/kernels6/{file}.py:{name}", "kind": f.adapter_kind, "what": dict(f.adapter_what)}
            if name in RIGHT:
                entry |= {"clean": True, "source": OWN, "truth": "", "cause": "", "way": RIGHT[name]}
            else:
                source, truth = WRONG[name]
                entry |= {"clean": False, "source": source, "truth": truth, "cause": truth}
            lines.append(json.dumps(entry))
    assert len(lines) == len(RIGHT) + len(WRONG)
    (Path(__file__).resolve().parent / "public.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
