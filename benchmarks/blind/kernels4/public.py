"""Writes public.json: `python public.py`."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

HERE = Path(__file__).resolve().parent
# name: (source, truth)
WRONG = {
    # encode, decode
    "ring_01": ("tile-ai/tilelang-metax #140", "numbers from 256 on saturate: the top binade of E4M3 (256 to 448) is lost, all of it becomes 448"),
    "ring_03": ("openvinotoolkit/openvino #30057", "double rounding in subnormals: numbers below 2**-6 are rounded to three mantissa bits first and to the subnormal grid then"),
    "ring_04": ("stillwater-sc/universal #1302", "overflow becomes infinity instead of saturating at 57344: finite numbers that round beyond the largest, from 61440 on, are coded 0x7C"),
    "ring_06": ("ROCm/aiter #3212", "ties round away from zero, not to even"),
    "ring_08": ("ROCm/llvm-project #3275", "stochastic rounding loses the carry: when mantissa plus noise overflows the exponent is not raised, so the number falls to the bottom of its binade"),
    "ring_10": ("uxlfoundation/oneDNN #2903", "random bits are aligned four bits too low, so stochastic rounding nearly always rounds toward zero"),
    "ring_11": ("tile-ai/tilelang #2704", "exponent field 0 is decoded as if it were normal: zero becomes 0.5 and 0.5 becomes 0.75"),
    "ring_12": ("own; FNUZ and OCP formats mixed up on ROCm", "E5M2 is decoded with the bias of E5M2FNUZ, 16 instead of 15: all finite numbers are half as large"),
    # casts
    "moor_01": ("vllm-project/vllm #53110", "the block's exponent is floor(log2(amax)) without the exponent of 448: scales are 2**8 (or 2**7) too large, the maximum maps to 1 and the range of E4M3 is not used"),
    "moor_02": ("ml-explore/mlx #4353", "MX scales are rounded to the nearest power of two, not up: half of the blocks have a scale that is half as large and saturate"),
    "moor_04": ("vllm-project/vllm #43557", "the MX scale is rounded down: the exponent of amax / 6 is taken without its mantissa, so scales are half as large and the maximum saturates"),
    "moor_05": ("sgl-project/sglang #8290", "the amax skips every second column, so the scale is too small where the largest number is in an odd column, and that saturates"),
    "moor_06": ("NVIDIA/TensorRT-LLM #16569", "the amax ignores strides: it reads memory linearly from the pointer, wrong for inputs that are not contiguous"),
    "moor_08": ("AMD-AGI/Primus #983", "stale cast of a weight: the cache looks at address and version, so new numbers in the same memory get the codes and the scale of the old ones"),
    "moor_09": ("own", "the scale is written where its inverse belongs"),
    "moor_10": ("NVIDIA/TransformerEngine #3342, the class", "gradients are scaled to 448, the top of E4M3, though their codes are E5M2: the scale is 128 times too large"),
    "moor_11": ("own; fmaxf and fminf drop NaN", "NaN is lost: fmin and fmax turn it into 448, and the amax ignores it"),
    "moor_13": ("pytorch/FBGEMM #6159, the class", "the last block of a row, where K is no multiple of 128, takes the scale of the block before it instead of its own"),
    "moor_14": ("flashinfer-ai/flashinfer #3497, the class", "the tensor's scale of NVFP4 is rounded to BF16, so all scales are off by up to 2**-9"),
    "moor_15": ("own; jax-ml/jax #30467 the class", "codes are computed with the block's scale before it is rounded to E4M3, not with the one that is stored"),
    "moor_17": ("vllm-project/vllm #42725, the class", "the grid of block scales is stored transposed (column-major in a row-major buffer)"),
    "moor_18": ("own", "the input is overwritten: a contiguous FP32 x is scaled in place"),
    "moor_19": ("NVIDIA/TransformerEngine #2911", "writes beyond the output: rows up to the next multiple of 16 are zeroed in memory that is not the kernel's"),
    "moor_20": ("own", "rounds toward zero: mantissas are truncated instead of rounded to nearest"),
    "moor_22": ("kekzl/imp #567", "nibbles are swapped: codes of columns 2i and 2i + 1 are exchanged"),
    # GEMMs
    "till_01": ("modular/modular #7165", "split-K partial sums are accumulated in BF16: every slice of 64 along K is rounded to the output's dtype and added in it"),
    "till_02": ("mlc-ai/TIRx-kernels #5", "the scales of a do not advance along K: every block of K uses those of the first block"),
    "till_03": ("pytorch/FBGEMM #6159", "the last block of K gets no scales where K is no multiple of 128"),
    "till_04": ("NVIDIA/cutlass #3596", "scales of b are modified in place: from row 128 on they are multiplied once more by the scales of a of the first row of each 128 rows before"),
    "till_06": ("sgl-project/sglang #25519", "E8M0's NaN is looked for at the wrong place: a scale of 128 (byte 134) becomes NaN, and byte 255 becomes infinity"),
    "till_08": ("own; pytorch/pytorch #193802 the class", "the scales of b are applied to rows instead of columns where M equals N"),
    "till_09": ("PTO-ISA/SuperNPUBench #122", "FP4 codes are read in the wrong format: E1M2 (0 to 1.75 in quarters) instead of E2M1"),
    "till_11": ("ROCm/rocm-libraries #9055", "the output is not cleared before split-K: from K = 256 on sums are added to what lay in out"),
    "till_12": ("huggingface/kernels-community #1153, the class", "the tail of K is dropped: what is beyond the last multiple of 32 is not summed"),
    "till_14": ("flashinfer-ai/flashinfer #3398, the class", "scales of a beyond row 128 are not reached: each row uses the scales of row modulo 128"),
    "till_15": ("own", "sums pass through FP16 before the scales are applied: they lose bits and overflow to infinity from 65520 on"),
    "till_16": ("own; fmaxf and fminf drop NaN", "NaN is hidden: the clamp of the output turns it into the largest BF16 number"),
    # grouped GEMMs
    "till_18": ("huggingface/kernels-community #1153", "stores are not masked at N: the overhang of the last tile of 64 columns overwrites the first columns of the next row with zeros"),
    "till_19": ("own", "an empty group shifts the weights: groups are numbered without the empty ones, so those behind one use the weight of another group"),
    "till_20": ("own; sgl-project/sglang #10296 the class", "all groups use the weight scales of group 0"),
    "till_21": ("huggingface/transformers #45621", "the last rows of each group, beyond its last multiple of 16, are not written and keep what lay in out"),
    "till_22": ("own; deepseek-ai/DeepGEMM's alignment of groups", "a tile of 16 rows is multiplied by the weight of its first row's group, so rows behind a boundary within a tile get the wrong group's weight"),
    "till_23": ("own", "scales of a are not offset by the group's first row: each group uses the scales of the first rows of all"),
    "till_24": ("own; pytorch's offs and TE's m_splits", "ends are read as counts: each group takes as many rows as its end says, so the first groups take rows of later ones"),
    # linear layers
    "sail_01": ("NVIDIA/TransformerEngine #3342", "dx reads the E5M2 codes of the gradient as E4M3"),
    "sail_02": ("AMD-AGI/Primus #983", "stale weight in y: the cast weight is kept by address and version, so a weight changed in the same memory is not seen in the forward pass"),
    "sail_03": ("own", "dw uses x as cast for the forward pass, with scales along K, instead of casting x transposed with scales along the tokens"),
    "sail_05": ("own", "the gradient's inverse scale is missing in dw"),
    "sail_06": ("own; RL-Align/RL-Kernel #313 the class", "y is rounded to BF16 before it becomes FP32, so FP32 outputs have eight bits"),
    "sail_07": ("AMD-AGI/Primus #1010", "silent fallback to BF16: where a size is no multiple of 32 nothing is cast to FP8"),
    # attention
    "sail_08": ("triton-lang/triton #4541", "the backward pass ignores the causal mask: dq, dk and dv come from unmasked probabilities"),
    "sail_09": ("Dao-AILab/flash-attention #2651, the class", "dk lacks the softmax scale 1 / sqrt(D)"),
    "sail_11": ("vllm-project/vllm #51363", "the descale of v is missing in o: the output is too large by v's scale (dq, dk and dv are right)"),
    "sail_12": ("own; padding without a mask", "padded keys are not masked: where S is no multiple of 32 keys of zeros count in the softmax"),
    "sail_13": ("own", "online softmax does not rescale the accumulator of o when the running maximum grows, only the sum; o is wrong beyond 32 keys"),
    # optimizers
    "sail_14": ("karpathy/nanochat #304", "eps is added before the bias correction of the second moment, so it is effectively larger by 1 / sqrt(1 - beta2**step)"),
    "sail_15": ("Nerogar/OneTrainer #996", "weight decay is applied in BF16 and rounded away before the update, so it has no effect"),
    "sail_16": ("tenstorrent/tt-metal #55935", "beta2 is cut to BF16: 0.99609 instead of 0.999"),
    "sail_18": ("kozistr/pytorch_optimizer #308, the class", "bias corrections use the step after: step + 1 instead of step"),
    "sail_19": ("Oneflow-Inc/oneflow #5960", "weight decay is multiplied by the bias-corrected learning rate, so it is too strong by 1 / (1 - beta1**step)"),
}
# name: (what it does in another way)
RIGHT = {
    "ring_02": "rounds with integers on FP32's bits, subnormals by adding 2**14",
    "ring_05": "rounds by adding and subtracting 2**(e + 50) in fp64; overflow becomes infinity, as declared",
    "ring_07": "counts thresholds, alternately with > and >=",
    "ring_09": "stochastic as declared, by comparing the part cut off with a uniform number",
    "ring_13": "through FP16's fields and a factor of 2**8",
    "moor_03": "exponents and their rounding up from FP32's bits as integers",
    "moor_07": "amax in two stages over 64 chunks; chunks in reverse order",
    "moor_12": "writes amax / 448 in FP32 and divides by it; at most two units from the recipe's scale",
    "moor_16": "column of blocks after column of blocks, codes by thresholds",
    "moor_21": "two passes over tiles of the transpose; codes are stored from it",
    "till_05": "fp32 sums of 128 promoted to a second accumulator with both scales, as in DeepGEMM; tiles of 64 x 96",
    "till_07": "blocks of 32 from the last to the first, shifted by the sum of both scale bytes",
    "till_10": "integer sums of halves in each block, then scales",
    "till_13": "split-K in three fp32 parts, reduced; one epilogue for scales",
    "till_17": "a fused multiply-add for each k from the last to the first, rounded to fp32 each",
    "till_25": "dense product with every group's weight, rows select theirs",
    "till_26": "persistent tiles that begin at a group's row, two accumulators, last tiles first",
    "sail_04": "codes in fp32 GEMMs with two slices of K, scales in the epilogue",
    "sail_10": "flash attention in tiles of 32 x 48; the backward pass recomputes from logarithms of the sums, tiles in reverse",
    "sail_17": "fp64 in chunks of 1000; the state holds corrected moments",
}
FILES = {"ring": "encodes4", "moor": "casts4", "till": "products4", "sail": "layers4"}


def main() -> None:
    entries = []
    for name in sorted({**WRONG, **RIGHT}, key=lambda n: (list(FILES).index(n[:4]), n)):
        file = FILES[name[:4]]
        function = getattr(importlib.import_module(file), name)
        what = {k: list(v) if isinstance(v, tuple) else v for k, v in function.adapter_what.items()}
        entry = {"name": name, "adapter": f"benchmarks/blind/kernels4/{file}.py:{name}", "kind": function.adapter_kind, "what": what}
        entry |= {"clean": name in RIGHT}
        if name in WRONG:
            source, truth = WRONG[name]
            entry |= {"source": source, "truth": truth, "cause": truth}
        else:
            entry |= {"source": "own", "truth": "", "cause": "", "way": RIGHT[name]}
        entries.append(json.dumps(entry))
    assert len(WRONG) == 60 and len(RIGHT) == 20, (len(WRONG), len(RIGHT))
    for prefix, file in FILES.items():
        here = {n for n in dir(importlib.import_module(file)) if n.startswith(prefix + "_")}
        assert here == {n for n in (*WRONG, *RIGHT) if n.startswith(prefix)}, here
    (HERE / "public.json").write_text("[\n" + ",\n".join(entries) + "\n]\n")


if __name__ == "__main__":
    main()
