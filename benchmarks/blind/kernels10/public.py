"""Writes public.json: for each kernel its kind, what it says of itself, whether it is right, and why not. `python public.py`."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

FILES = ("hulls10", "ropes10", "sails10", "decks10")
OWN = "own"
RIGHT = {
    "hull_03": "the place among the 126 middles between two numbers; a tie goes up from an odd code",
    "hull_06": "whole numbers: half a step and the lowest bit that stays are added to the bits of FP32, subnormals are counted in steps of 2**-16",
    "hull_12": "codes become bits of FP16, times 256; NaN is put in",
    "rope_03": "blocks from the last to the first; amax from the largest and the smallest number, the byte by a search among 448 * 2**e",
    "rope_08": "one column of blocks after another, from the last to the first, written in place; division by the stored scale",
    "rope_12": "tile by tile, amax row by row; scale amax / 448 without a reciprocal, codes by division by it",
    "sail_03": "blocks of 128 from the last to the first, each promoted with the product of both scales",
    "sail_06": "four interleaved lanes of K in FP32, added as a tree; both scales in the epilogue",
    "sail_12": "tiles of 24 x 40 and slices of 96, which no block divides, written in place",
    "sail_14": "rows look up their group by a search in the ends; groups from the last to the first, rows gathered and scattered",
    "sail_18": "every row times the weights of all groups in one GEMM; a mask keeps its own",
    "deck_03": "20 tokens at a time; dw is accumulated over them",
    "deck_07": "dx and dw from casts down the columns, without a transposition; y is computed transposed",
    "deck_09": "online softmax in base 2 over blocks of 24 keys; the backward pass recomputes the probabilities from their logarithms, delta from o and its gradient",
    "deck_12": "head by head; logsumexp, the scale on q beforehand, delta from the probabilities",
    "deck_16": "moments by interpolation; both corrections in the size of the step, so that eps is multiplied by the root, too",
}
WRONG = {
    "hull_01": ("vllm-project/vllm #45562", "codes of E4M3FNUZ, whose bias is 8 instead of 7: each code means twice its number, and all from 224 on saturate"),
    "hull_02": ("triton-lang/triton #5925", "ties go away from zero instead of to the even code"),
    "hull_04": ("NVlabs/cutile-rs #250", "the upper byte of FP16 is taken as the code of E5M2: the lower bits are cut off instead of rounded"),
    "hull_05": ("tenstorrent/tt-metal #29734", "magnitudes below 2**-6 become zero: subnormal numbers are flushed (those that would round up to 2**-6, too)"),
    "hull_07": ("ROCm/rocm-systems #6870", "all ties go to the smaller magnitude: each of the seven thresholds is compared with >, also where the even code lies above (0.75, 1.75, 3.5)"),
    "hull_08": ("tile-ai/tilelang #3205", "NaN becomes 448: the clamp by fmin and fmax returns the operand that is no NaN"),
    "hull_09": (OWN, "noise from 0 to 1 step is added and the sum then rounded to the nearest instead of down: magnitudes are half a step too large on average, and some numbers skip a neighbour"),
    "hull_10": ("tile-ai/tilelang #2702", "subnormal codes get the leading one of a normal number: code m of 1 to 7 becomes (1 + m / 8) * 2**-7"),
    "hull_11": (OWN, "the sign is looked for in bit 7 instead of bit 3 of the byte: negative numbers come out positive"),
    "hull_13": (OWN, "codes of exponent field 31 are decoded as numbers: infinity becomes 65536, NaN 81920 to 114688"),
    "rope_01": ("meta-pytorch/tritonbench #1145", "the scale 448 / amax is stored instead of its inverse; codes are right"),
    "rope_02": ("vllm-project/vllm #50467", "the scale of the E5M2 gradient is that of E4M3, 448 / amax instead of 57344 / amax: only 1 / 128 of the range is used"),
    "rope_04": (OWN, "each row has the scale of the whole tensor's amax instead of its own"),
    "rope_05": (OWN, "the amax is that of the signed numbers (the largest number of the block, at least 0) instead of the magnitudes: a negative peak saturates"),
    "rope_06": ("vllm-project/vllm #34824", "the scales of the 128 x 128 blocks are written transposed, column by column; codes are right. It shows where several blocks lie along M and along K"),
    "rope_07": ("ROCm/aiter #3212", "the exponent of the scale is floor(log2(amax)) - 8, the floor rule of OCP, instead of rounded up: amaxes above 1.75 times a power of two saturate"),
    "rope_09": ("ml-explore/mlx #4353", "log2(amax / 448) is rounded to the nearest exponent instead of up: about half of the blocks saturate"),
    "rope_10": (OWN, "NaN is replaced by 0 before the cast: it is lost and its block looks ordinary"),
    "rope_11": ("huggingface/transformers #46763", "codes are made with amax / 6, and the E4M3 number that it is rounded to is stored: codes and stored scale do not belong together"),
    "rope_13": (OWN, "codes of a weight are made with scales of 1 x 16 blocks, and the scale of the first row of each 16 x 16 block is stored for all"),
    "rope_14": (OWN, "the scale comes from the amax of the call before (the first call uses its own): a stale scale, as under delayed scaling"),
    "rope_15": (OWN, "columns behind the last whole 16 are never written: their codes are what the memory held. Scales are right"),
    "rope_16": ("deepseek-ai/DeepGEMM, deep_gemm/utils/math.py", "the amax is at least 1e-4: blocks below get the scale of 1e-4 and lose their small numbers"),
    "sail_01": (OWN, "the scale of b is forgotten"),
    "sail_02": (OWN, "the scale of b for column n is applied to row m (index m modulo N) instead: it is broadcast along the wrong side"),
    "sail_04": ("pytorch/FBGEMM #6159", "products behind the last whole 128 of K are left out"),
    "sail_05": ("mlc-ai/TIRx-kernels #5", "all of K gets the scale of a's first block of its row: the index does not go on with K"),
    "sail_07": (OWN, "scale bytes are read as signed numbers: from 128 on they mean 2**-256 times their scale, and products vanish"),
    "sail_08": ("flagos-ai/FlagGems #5876", "the sum is kept in BF16 and rounded after each 64 of K, although out is FP32"),
    "sail_09": (OWN, "the sum of the products of codes is converted to FP16 before the scales: it has 11 bits, and above 65504 it is infinite"),
    "sail_10": ("ROCm/rocm-libraries #9055", "0 times what out held is added (beta = 0 is multiplied, not skipped): NaN in the memory of out stays NaN"),
    "sail_11": ("ROCm/aiter #2466", "b is read as if it were contiguous with a row stride of K, from its first element on: other layouts (transposed, columns of a wider matrix) give other elements"),
    "sail_13": (OWN, "the weight of each group is multiplied by the scales of group 0"),
    "sail_15": (OWN, "the end of a group counts as its last row: the row at which a group begins is computed with the weight of the group before (the first one that ends there)"),
    "sail_16": ("deepseek-ai/DeepGEMM #450", "each tile of 16 rows is computed with the weight of the group of its first row: rows of a tile behind a boundary get the wrong weight"),
    "sail_17": (OWN, "of each group the rows behind its last whole 8 are left zero"),
    "sail_19": (OWN, "the ends are read as sizes: each group begins where the sizes before it end, so from the second group on too many rows get a group's weight, and later groups lie behind the end"),
    "deck_01": ("NVIDIA/TransformerEngine #3342", "the gradient is cast to E4M3 instead of E5M2, in dx and in dw"),
    "deck_02": (OWN, "dw uses x as it came, in BF16, instead of its cast: one operand keeps its high precision"),
    "deck_04": (OWN, "dw sums only the last index of x's first dimension where x has more than two: the tokens before are left out"),
    "deck_05": (OWN, "dw is rounded to BF16, although the layer is FP32"),
    "deck_06": ("marin-community/marin #7659", "the scale of the gradient comes from the amax of the gradient of the call before (the first call uses its own); it shows in dx and dw"),
    "deck_08": ("Dao-AILab/flash-attention #1915", "the causal mask is one late: each query sees the key behind its own, too"),
    "deck_10": (OWN, "dq is not multiplied by the softmax scale: it is sqrt(D) times too large"),
    "deck_11": ("NVIDIA/TensorRT-LLM #18111", "keys are padded with zeros to a multiple of 16 and not masked: each adds exp(0) to the sum of the softmax"),
    "deck_13": ("XunhaoLai/native-sparse-attention-triton #27", "head h reads k and v of head h // 2, as if two query heads shared one, although each has its own; dk and dv lie at h"),
    "deck_14": ("oxiglade/mlx-rs #301", "the second moment is not corrected for its bias: updates of the first steps are too large"),
    "deck_15": (OWN, "eps is added under the root of the second moment instead of behind it"),
    "deck_17": ("nntrainer/nntrainer #3565", "the decay is added to the gradient (L2) instead of being decoupled: it passes through both moments"),
    "deck_18": ("keras-team/keras-hub #2629", "the second moment is stored in BF16, although FP32 is declared: with beta2 = 0.999 small changes of it are rounded away"),
}


def main() -> None:
    here = Path(__file__).resolve().parent
    sys.path.insert(0, str(here))
    lines = []
    for file in FILES:
        module = importlib.import_module(file)
        for name in sorted(n for n in vars(module) if hasattr(getattr(module, n), "adapter_kind")):
            run = getattr(module, name)
            source, text = WRONG.get(name, (OWN, ""))
            entry = {"name": name, "adapter": f"benchmarks/blind/kernels10/{file}.py:{name}", "kind": run.adapter_kind, "what": run.adapter_what}
            entry |= {"clean": name in RIGHT, "source": source, "truth": text, "cause": text}
            if name in RIGHT:
                entry["way"] = RIGHT[name]
            assert (name in RIGHT) != (name in WRONG), name
            lines.append(json.dumps(entry, ensure_ascii=False))
    assert len(lines) == len(RIGHT) + len(WRONG)
    (here / "public.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
