"""Writes public.json: for each kernel its kind, what it says of itself, whether it is right, and why not. `python public.py`."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

FILES = ("codes9", "casts9", "products9", "layers9")
OWN = "own"
RIGHT = {
    "quartz_02": "FP64 numbers times 2**-1016, so that their own subnormals are those of E4M3; 49 bits are rounded off as a whole number",
    "quartz_08": "the code is the count of the middles passed",
    "quartz_12": "mantissa with its hidden bit times a power of two, no table",
    "basalt_07": "block by block in place; the exponent is that of the amax's FP32 bits plus 0x1FFFFF",
    "basalt_10": "the amax as the largest whole number among the FP32 bits; codes by torch's conversion behind a clamp, 24 rows at a time",
    "basalt_14": "codes by comparing magnitudes with the middles times the block's scale, no division",
    "schist_03": "eight of K at a time from the last to the first in FP32, scales at the end",
    "schist_07": "blocks of 32 with the product of their scales, added as a tree in FP64",
    "schist_10": "the transposed product in tiles of 40 x 56, written through a transposed view",
    "schist_15": "the group of each row by a binary search, its weight gathered, 16 rows at a time",
    "schist_18": "each group's product for all rows from the last group to the first, rows chosen by a mask",
    "gneiss_03": "y and dx as transposed products, y in tiles of 24 columns; dw over chunks of 32 tokens in FP64",
    "gneiss_07": "y over K backwards, dx over chunks of 48 features",
    "gneiss_11": "forward over tiles of 16 keys with a running maximum; backward over the same tiles from the maximum and the sum",
    "gneiss_13": "row by row over the keys up to it; dk and dv added up",
    "gneiss_16": "the state holds sums without the factor 1 - beta, divided by the sums of the powers of beta",
}
WRONG = {
    "quartz_01": ("triton-lang/triton #3634 (its class)", "the mantissa is truncated towards zero instead of rounded to nearest"),
    "quartz_03": ("triton-lang/triton #11753", "ties round away from zero instead of to the even code"),
    "quartz_04": ("triton-lang/triton #3634 (its class)", "results below 2**-6 are flushed to a zero of their sign: the format's subnormal numbers are never written"),
    "quartz_05": ("triton-lang/triton #11753 (its class)", "FP32 is first rounded to BF16, then to E4M3 (double rounding); BF16 is right"),
    "quartz_06": ("triton-lang/triton #7904 (its class)", "finite numbers from 61440 on become infinity although the encoder is declared to saturate"),
    "quartz_07": ("class: nearest entry of a table by argmin, as in bitsandbytes and llm-compressor", "ties go to the smaller magnitude, not to the even code: 0.75, 1.75 and 3.5 round down"),
    "quartz_09": ("pytorch/ao #1124 (its class: the width of the random bits)", "the noise reaches only half a step: a number rounds up never below the middle of its step and with probability 2 f - 1 above it"),
    "quartz_10": ("1bit-MONSTER/1bit-MONSTER #300", "subnormal codes are read with the hidden bit and the exponent -7: 1 + m/8 times 2**-7"),
    "quartz_11": ("intel/intel-xpu-backend-for-triton #7029", "the two NaN codes are read as 480 and -480"),
    "quartz_13": ("class: E4M3FN read as E4M3FNUZ, as in vLLM and SGLang on ROCm", "codes are read as those of E4M3FNUZ: half as large, -0 is NaN, and the NaN codes are 240"),
    "basalt_01": ("class: an amax without the absolute value, as in several trackers", "the amax is the largest signed number: where the largest magnitude is negative the scale is too small and numbers saturate; a tensor without positive numbers gets the scale 1"),
    "basalt_02": ("class: one FP8 maximum for both formats, as in TransformerEngine and torchao", "the scale of an E5M2 gradient is made with E4M3's maximum 448 instead of 57344"),
    "basalt_03": ("NVIDIA/TransformerEngine #820 (its class)", "the scale is that of the call before (the first call has its own)"),
    "basalt_04": ("class: scales by tensor where the checkpoint says by channel, as in vLLM and llm-compressor", "each row gets the scale of the whole tensor's amax"),
    "basalt_05": ("class: floor and ceil of E8M0 exponents, as in torchao and NVIDIA/Fuser #5643", "the exponent is floor(log2(amax)) - 8, as the OCP text has it, not rounded up: amaxes above 1.75 times a power of two saturate"),
    "basalt_06": ("class: amax over part of a tile, as in Triton kernels with a smaller BLOCK_M", "the amax of a 128 x 128 block is taken over its first 64 rows only"),
    "basalt_08": ("PFCCLab/PaddleAPITest #727 (its class: output_scale_transpose)", "the scales are written in the order of the transposed grid (K / 128, M) into a buffer of (M, K / 128); codes are right under their own"),
    "basalt_09": ("class: swizzled scale layouts an entry off, as in TransformerEngine and torchao", "each scale byte is stored one block further along K, the last one in the first place"),
    "basalt_11": ("vllm-project/vllm #43557", "the exponent of an MXFP4 block rounds up from 1.75 times a power of two on instead of above 1.5 times: amaxes between saturate"),
    "basalt_12": ("radixark/miles #1054 (its class)", "codes are made with the block's scale before it is rounded to E4M3, the rounded one is stored"),
    "basalt_13": ("jax-ml/jax #30467 (its class)", "the tensor's scale is amax / 6 instead of amax / (6 * 448): block scales lie in E4M3 below 1 and round differently, small ones to subnormals or zero"),
    "basalt_15": ("class: vectorised stores without a tail, as in vLLM's quantization kernels", "codes beyond the last whole 16 columns are not written; the scales are right"),
    "basalt_16": ("ModelTC/LightX2V #877 (its class)", "the multiplier (448 / amax) is stored instead of its inverse"),
    "schist_01": ("flagos-ai/FlagGems #5876", "partial sums over 64 of K are rounded to BF16 and added up in the BF16 output"),
    "schist_02": ("NVIDIA/cutlass #3615", "split-K in two: the second half of the blocks of K reads the scales of the first half, of both operands"),
    "schist_04": ("pytorch/FBGEMM #6159", "the scales of the ragged last block of K are never applied (1 instead)"),
    "schist_05": ("class: row and column scales in the epilogue, as in CUTLASS and torch._scaled_mm", "the weight's row scales are applied along M instead of N: row i is multiplied with the scale of feature i mod N"),
    "schist_06": ("class: one scale passed for both operands, as in vLLM", "scale_inv_a is applied twice and scale_inv_b never"),
    "schist_08": ("class: E8M0 bytes shifted into the exponent field, as in Triton and vLLM", "scale bytes become FP32 by a shift by 23: the byte 0 means 0 instead of 2**-127, the byte 255 infinity instead of NaN"),
    "schist_09": ("class: weight scales stored transposed, as in vLLM and FlashInfer", "the memory of the weight's scales is read as (K / 16, N / 16)"),
    "schist_11": ("class: order of two 4-bit codes in a byte, as in vLLM and llm-compressor", "in the weight the two codes of each pair along K change places, in the other operand they do not; an odd last one stays"),
    "schist_12": ("class: N that is no multiple of the vector width, as in SGLang and CUTLASS", "columns beyond the last whole 8 of N are not written"),
    "schist_13": ("class: one scale for all experts, as in vLLM's fused MoE", "all groups use the weight scale of the first group"),
    "schist_14": ("deepseek-ai/DeepGEMM #20 (its class)", "empty groups are skipped and the groups behind them use the weights of the groups before"),
    "schist_16": ("deepseek-ai/DeepGEMM #34 (its class)", "the ends are read as inclusive: the first row of each group behind the first uses the weight of the group before; with empty groups between, that of the first group with this end"),
    "schist_17": ("deepseek-ai/DeepGEMM #15", "each end is rounded up to a multiple of 16: rows up to there use the weight of the group before"),
    "schist_19": ("deepseek-ai/DeepGEMM #268 (its class)", "in each group the rows beyond its last whole 8 are zero"),
    "gneiss_01": ("class: gradients in the format of activations, as in TransformerEngine and torchao", "the gradient is cast to E4M3 instead of E5M2; dx and dw are wrong, y is right"),
    "gneiss_02": ("class: an operand of wgrad left in high precision, as in torchao", "dw multiplies the cast gradient with x that is not cast"),
    "gneiss_04": ("class: the row-wise cast of the forward reused in wgrad, as in TransformerEngine and torchao", "dw uses x as the forward cast it, with scales along K, instead of x.T cast with scales along the tokens"),
    "gneiss_05": ("class: gradient accumulation fused into a BF16 main_grad, as in TransformerEngine and Megatron-LM", "dw is added up in BF16 over chunks of 32 tokens"),
    "gneiss_06": ("class: sequence first and batch first mixed up, as in Megatron-LM", "for dw the first two dimensions of x are exchanged before it is flattened, those of the gradient are not; dw only"),
    "gneiss_08": ("class: the softmax scale in the backward, as in flash-attention and Triton's tutorial", "dk lacks the factor 1 / sqrt(D)"),
    "gneiss_09": ("Dao-AILab/flash-attention #436 (its class)", "the backward's causal mask lets one key more pass (j <= i + 1), with the right lse; o is right"),
    "gneiss_10": ("tspeterkim/flash-attention-minimal #2 (its class)", "keys are padded with zeros to a multiple of 16 and their logits of 0 are not masked: they take part in the softmax's sum"),
    "gneiss_12": ("class: heads of K and V under GQA, as in flash-attention and vLLM", "head h reads k and v of head h // 2, as if two heads of q shared one; dk and dv are those of the reading head"),
    "gneiss_14": ("class: a step that is increased twice, as in fused optimizers of PyTorch and Apex", "the bias corrections use step + 1"),
    "gneiss_15": ("bitsandbytes-foundation/bitsandbytes #2010", "the decay multiplies the parameter after the update instead of before it"),
    "gneiss_17": ("Nerogar/OneTrainer #1005", "both moments are stored in BF16 although they are declared as float32"),
    "gneiss_18": ("aiqm/torchani #261", "eps is added to the square root of the uncorrected second moment, so it counts 1 / sqrt(1 - beta2**step) times as much"),
}


def main() -> None:
    here = Path(__file__).resolve().parent
    sys.path.insert(0, str(here))
    lines = []
    for file in FILES:
        module = importlib.import_module(file)
        for name in sorted(n for n in vars(module) if hasattr(getattr(module, n), "adapter_kind") and n[-3:-2] == "_"):
            kernel = getattr(module, name)
            clean = name in RIGHT
            source, truth = (OWN, "") if clean else WRONG[name]
            entry = {
                "name": name, "adapter": f"benchmarks/blind/kernels9/{file}.py:{name}", "kind": kernel.adapter_kind, "what": kernel.adapter_what,
                "clean": clean, "source": source, "truth": truth, "cause": truth,
            } | ({"way": RIGHT[name]} if clean else {})
            lines.append(json.dumps(entry))
    assert len(lines) == len(RIGHT) + len(WRONG)
    (here / "public.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
