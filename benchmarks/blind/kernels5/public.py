"""Writes public.json: for each kernel its kind, what it says of itself, whether it is right, and why not. `python public.py`."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

FILES = ("codes5", "casts5", "products5", "layers5")
OWN = "own"
RIGHT = {
    "reed_02": "a binary search in the middles between the format's numbers",
    "reed_04": "declared stochastic: 24 random bits are added below the last kept bit, then the rest is cut off",
    "reed_09": "a code is the upper byte of a FP16 number",
    "alder_03": "the exponent of an MX scale by integers: what is above 1.75 carries into it",
    "alder_06": "amaxes of stripes, their maximum, torch's own conversion behind a clamp",
    "alder_10": "tile by tile, each written into its place of the result",
    "birch_03": "split-K in two, sums of 128 in FP32, each promoted with its scales, the later share first",
    "birch_06": "scales are multiplied in first, FP32, four shares of K from the last to the first, added as a tree",
    "birch_13": "groups are padded to the longest and multiplied as one batch",
    "cedar_03": "codes are multiplied in FP32, K split in two, rows' scales in the epilogue",
    "cedar_08": "flash attention: blocks of 16 queries and 48 keys, running maximum, backward from the log of the sums",
    "cedar_12": "AdamW with folded corrections (eps folded, too), moments by lerp, one expression with addcdiv",
}
WRONG = {
    "reed_01": ("ucb-bar/saturn-vectors #101", "overflow becomes NaN instead of saturating: finite numbers from 496 up to 63488 are coded as NaN; below 496 and from 63488 on they saturate at 448"),
    "reed_03": ("ROCm/aiter #3992", "ties are rounded away from zero instead of to even: 0.25, 1.25, 2.5 and 5 are coded as 0.5, 1.5, 3 and 6"),
    "reed_05": ("microsoft/onnxruntime #16940", "NaN becomes infinity where the two upper bits of its FP32 mantissa are 0 (payload in the lower bits): only these two bits are kept and the code is 0x7C"),
    "reed_06": ("FlashML-org/FreeToken #85", "double rounding: FP32 numbers are truncated to FP16 first (10 bits of mantissa), so that those just above the middle of two codes fall on it and are rounded to even; BF16 is right"),
    "reed_07": ("uxlfoundation/oneDNN #2903", "stochastic rounding is biased toward zero: the random bits are added four places too low, so a number rounds up only if it lies in the last sixteenth of its step"),
    "reed_08": ("tile-ai/tilelang #2702", "subnormal codes are decoded as normal ones, with an implicit one: 0x01 gives 2**-7 * 1.125 instead of 2**-9"),
    "alder_01": ("sgl-project/sglang #30900", "the bound of another format (224, E4M3FNUZ) instead of 448: scales are amax / 224, twice as large, and codes stop at 224"),
    "alder_02": ("kekzl/imp #250", "codes are made with the exact scale amax / 6, but the stored one is rounded up to a power of two: the codes do not belong to the scale, off by up to a factor of two"),
    "alder_04": ("ml-explore/mlx #4353", "the scale is rounded to the nearest power of two (of its logarithm) instead of up: half of the blocks get a scale half as large, and their largest numbers saturate at 448"),
    "alder_05": ("vllm-project/vllm #20578", "the tensor's amax lacks the absolute value (the largest number is taken): where the largest magnitude is negative, the tensor's scale is too small and blocks saturate"),
    "alder_07": ("NVIDIA/Model-Optimizer #858", "the scales of the weight's blocks are stored transposed (columns of blocks first); the codes are right"),
    "alder_08": ("vllm-project/vllm #35210", "only the first half of the columns is written: the bound counts 16 columns for a thread that handles 8; codes of the second half stay what the buffer held"),
    "alder_09": ("pytorch/FBGEMM #2713", "strides of x are used for the result: of a transposed x the codes are stored in the order of its memory, as if the result were transposed, too"),
    "alder_11": ("sgl-project/sglang #40581", "NaN is lost: the clamp by fmin and fmax turns it into 448, the largest number"),
    "alder_12": ("NVIDIA/Model-Optimizer #381", "rows of zeros give NaN: the amax of 0 makes the multiplier infinite, and 0 times infinity is NaN; their stored scale is 0"),
    "alder_13": ("sgl-project/sglang #33533", "the multiplier 1 / scale is FP16 and overflows: blocks with an amax up to 448 * 2**-16 get infinity (numbers saturate, zeros are NaN); for amaxes above 448 * 2**24 it is 0"),
    "alder_14": (OWN + ", the class of an amax buffer that is not set to zero", "stale amax, so a wrong scale: the buffer is never set to zero, so the scale belongs to the largest amax of all calls so far; the first call is right"),
    "birch_01": ("pytorch/FBGEMM #6159", "the scales of the last block along K are not applied where K is a multiple of 32 but not of 128: its sum is added without them"),
    "birch_02": ("ml-explore/mlx #3762", "with N below 8 the bytes of b's scales are used as numbers (127 instead of 1) in whole blocks of 32, without decoding E8M0; the remainder of K is right"),
    "birch_04": ("sgl-project/sglang #20819", "b's scale pointer never advances along K (64 // 128 is 0): all blocks use the scales of the first 128 of K; right for K up to 128"),
    "birch_05": ("ROCm/composable_kernel #2271", "split-K adds its four partial sums in BF16, the dtype of out: each partial sum and each addition is rounded"),
    "birch_07": ("ROCm/aiter #2567", "rows beyond the last whole 16 are not set to zero before the sums are added: the result is added to what out held before"),
    "birch_08": ("flashinfer-ai/flashinfer #5149", "the factor of b's scale is missing in the epilogue: results are multiplied by a's scale only"),
    "birch_09": ("NVIDIA/TransformerEngine #3262", "the scale bytes 0 and 255 are decoded wrongly, by a shift into the exponent: 0 gives 0 instead of 2**-127, 255 gives infinity instead of NaN"),
    "birch_10": ("NVIDIA/TensorRT-LLM #12835", "the tail of K is left out: K is rounded down to a multiple of 64; with K below 64 all is zero"),
    "birch_11": ("vllm-project/vllm-ascend #16806", "every group uses the weight scales of the first group"),
    "birch_12": ("flashinfer-ai/flashinfer #3650", "NaN (or infinity) in one row spreads over all rows of its tile of 32 in the group: they are multiplied by 0 and added"),
    "birch_14": ("huggingface/kernels-community #1154", "the store is not bounded by N: where N is above 32 and no multiple of 32, the last tile's overhang of zeros overwrites the first columns of the following row"),
    "birch_15": (OWN + ", the class of a boundary that is off by one", "the first row of each group is multiplied by the weight of the group before: a row at an end is counted to the group that ends there (also with its scale)"),
    "cedar_01": ("NVIDIA/TransformerEngine #3342", "the bytes of the E5M2 gradient are read as E4M3 in both backward products: dx and dw are wrong, y is right"),
    "cedar_02": ("Primus #983 (key of the cache), the class of NVIDIA/TransformerEngine #1596", "dx uses a stale cast of the weight: the transposed cast is cached by address and version and is not renewed if the weight changes in place without a new version"),
    "cedar_04": (OWN + ", the class of casts along the wrong axis for wgrad", "dw uses casts along the wrong axis: x and grad are reused as they were cast for the forward and dgrad products (blocks along K and N) instead of being cast in blocks along the tokens"),
    "cedar_05": (OWN + ", the class of float() that does not copy", "x is overwritten: a contiguous FP32 x is scaled in place (float() makes no copy), the caller's x is destroyed and dw is computed from the scaled one"),
    "cedar_06": ("the class of tile-ai/TileOPs #51", "the accumulator of o is not rescaled when the running maximum rises with a later block of 32 keys (the sum is): o is wrong beyond 32 keys, and with it dq and dk by way of delta; dv is right"),
    "cedar_07": ("the class of Dao-AILab/flash-attention #2651", "dk lacks the softmax scale: it is sqrt(D) times too large"),
    "cedar_09": ("the class of tile-ai/TileOPs #51", "padded keys are not masked: where S is no multiple of 32, the keys of zeros up to it take part in the softmax with score 0, and rows sum to less than one"),
    "cedar_10": (OWN + ", the class of pytorch/pytorch #184087", "the term delta = sum(o * grad) is left out of the gradient of the scores: dq and dk are wrong, o and dv are right"),
    "cedar_11": ("karpathy/nanochat #304", "eps is scaled by the bias correction: it is added before the second moment is corrected, so it counts 1 / sqrt(1 - beta2**step) times as much"),
    "cedar_13": ("huggingface/transformers #18946, nntrainer/nntrainer #3565", "weight decay is coupled: added to the gradient (L2, Adam) and so to both moments, instead of decoupled (AdamW)"),
    "cedar_14": ("Nerogar/OneTrainer #996", "weight decay is rounded to BF16 before the step: 0.001 of a number is less than half of its last bit, so the decay is mostly lost"),
}


def main() -> None:
    """One line an entry, in the order of the files."""
    lines = []
    for file in FILES:
        module = importlib.import_module(file)
        for name, f in vars(module).items():
            if not hasattr(f, "adapter_kind"):
                continue
            entry = {"name": name, "adapter": f"benchmarks/blind/kernels5/{file}.py:{name}", "kind": f.adapter_kind, "what": dict(f.adapter_what)}
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
