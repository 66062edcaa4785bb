"""Writes public.json: `python public.py`. Names and docstrings of the kernels do not tell right from wrong; this page does."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

TE, TORCH, VLLM, OTHER = "TransformerEngine", "pytorch", "vllm", "own"
CAUSES: dict[str, tuple[str, str]] = {
    "encode_01": (OTHER, "keeps two of the three mantissa bits: every odd code of a normal number becomes the even one below"),
    "encode_02": (OTHER, "goes through float16: numbers beyond 65,504 become infinite there and NaN in the end, where they should saturate, and others are rounded twice"),
    "encode_03": ("amd fnuz", "writes codes of E4M3FNUZ (bias 8) into a tensor of E4M3FN"),
    "encode_05": (OTHER, "negative zeros, and negative numbers that round to zero, lose their sign"),
    "encode_06": ("NaN lost", "NaN becomes the largest number, 448"),
    "encode_07": ("tail", "the last numel % 4 codes are never written"),
    "encode_08": (OTHER, "E5M2 saturates at 448, the largest number of E4M3"),
    "encode_09": (OTHER, "takes the high byte of a float16: truncates instead of rounding to nearest"),
    "encode_11": (OTHER, "ties of E2M1 round away from zero"),
    "encode_12": (OTHER, "the sign of E2M1 is put at bit 7 instead of bit 3"),
    "encode_13": (OTHER, "E2M1 saturates at 4: the code of 6 is never given"),
    "encode_15": (OTHER, "subnormal numbers of E5M2 are flushed to zero"),
    "encode_17": ("stochastic bits", "stochastic rounding draws only four values (2 random bits), so it is biased toward the larger neighbour"),
    "decode_01": (OTHER, "subnormal codes are read as normal ones, with a leading 1"),
    "decode_02": ("NaN lost", "the codes of NaN are read as 480"),
    "decode_04": ("amd fnuz", "reads codes with bias 8 (E4M3FNUZ): half of every number"),
    "decode_05": (OTHER, "the infinities of E5M2 are read as 65,536"),
    "decode_07": (OTHER, "the table of E2M1 ends with 8 instead of 6"),
    "cast_01": (OTHER, "the amax is taken over the first 8,192 numbers only"),
    "cast_02": (OTHER, "the amax is the maximum without absolute value: large negative numbers saturate"),
    "cast_03": (OTHER, "the scale is one power of two too large: large numbers of a row saturate"),
    "cast_04": (OTHER, "each row is cast with the scale of the row before"),
    "cast_05": (OTHER, "the amax of a block of 128 is taken over its first 64 numbers"),
    "cast_06": (OTHER, "the amax of a block of 128 x 128 is that of its first row"),
    "cast_07": ("OCP floor", "the exponent of the scale is rounded down (OCP's floor rule) where the recipe rounds up: the largest numbers saturate"),
    "cast_08": (OTHER, "scale bytes are one too small: the bias of E8M0 is taken as 126"),
    "cast_09": (OTHER, "the exponent of the scale is rounded to the nearest, not up: some blocks saturate"),
    "cast_10": ("eps of amax", "the amax is at least 1e-3, so small tensors are cast with a scale that is far too small"),
    "cast_11": (OTHER, "gradients in E5M2 are scaled to 448, the largest number of E4M3, not 57,344"),
    "cast_12": (OTHER, "a ragged last block takes the scale of the block before it"),
    "cast_13": ("stale amax", "the scale is that of the amax of the previous call with this shape"),
    "cast_14": (OTHER, "E2M1 codes are truncated instead of rounded to nearest"),
    "cast_15": (OTHER, "scales of FP4 are computed with 448, the largest number of E4M3, instead of 6"),
    "cast_16": ("scales in BF16", "scale_inv is rounded to BF16 after the codes were made with the exact scale"),
    "cast_17": (OTHER, "scale is stored in place of scale_inv"),
    "cast_18": (OTHER, "a column-major matrix is read as if it were row-major"),
    "cast_19": (OTHER, "the grid of scales of 128 x 128 blocks is stored transposed"),
    "cast_20": (OTHER, "the amax goes through float16: beyond 65,504 it is infinite and the scale 1; below 6e-8 it is zero"),
    "cast_21": ("tail", "the last rows, M % 4 of them, are never written"),
    "cast_22": ("reads past the end", "the amax of a ragged last block also sees the memory behind the end of the row (columns of the wider matrix)"),
    "cast_23": (OTHER, "x is rounded to BF16 and multiplied by its scale in BF16 before the cast: two roundings"),
    "cast_24": (OTHER, "blocks whose amax is below 2^-20 are cast to zeros"),
    "gemm_01": ("tail", "the last K % 32 terms of each sum are left out"),
    "gemm_02": (OTHER, "sums are kept in float16: they lose bits and overflow"),
    "gemm_03": (OTHER, "the scales of the rows of a are applied along the columns of the result"),
    "gemm_04": (OTHER, "the scales of b are indexed by blocks of 64 rows instead of 128"),
    "gemm_05": (OTHER, "of every four scales of 32 along K only the first is used, for all 128"),
    "gemm_06": (OTHER, "E8M0 bytes are read with bias 126 on both sides: four times too large"),
    "gemm_07": (OTHER, "the result is truncated to BF16 instead of rounded"),
    "gemm_08": ("beta = 1", "adds to what was in the output buffer"),
    "gemm_09": (OTHER, "a square b is not transposed: a @ b in place of a @ b.T"),
    "gemm_10": ("tail", "the last M % 16 rows are never written"),
    "gemm_11": (OTHER, "the E8M0 byte 255 (NaN) is read as 254, the largest scale: NaN is lost"),
    "gemm_12": (OTHER, "the accumulator is rounded to BF16 after every block of 128 of K"),
    "gemm_13": ("split K", "two halves of K are summed apart, and each is rounded to BF16 before they are added"),
    "gemm_14": ("TE #3342", "E5M2 operands are read as E4M3"),
    "gemm_15": (OTHER, "scales of blocks of 16 are used for 32: every second one is never read"),
    "gemm_16": (OTHER, "code 7 of E2M1 is decoded as 8 instead of 6"),
    "gemm_17": (OTHER, "the sign of every second code of a (the high nibbles) is lost"),
    "gemm_18": ("NaN lost", "NaN in a counts as zero"),
    "gemm_19": ("stale workspace", "the result of the previous call of this shape is added: the workspace is not cleared"),
    "gemm_20": (OTHER, "neighbouring codes of a are swapped (the order of nibbles in a byte)"),
    "gemm_21": ("scales in BF16", "the scales are rounded to BF16"),
    "gemm_22": (OTHER, "the result saturates at 65,504, the largest number of float16"),
    "grouped_01": (OTHER, "a group without rows is skipped in the count of weights: all groups behind it take the weight of another"),
    "grouped_02": (OTHER, "the last group is not computed: its rows are zero"),
    "grouped_03": (OTHER, "all groups use the weight scales of the first group"),
    "grouped_04": (OTHER, "a group begins at a multiple of 16: it overwrites the last rows of the group before it"),
    "grouped_05": (OTHER, "the scales of the rows begin anew at row 0 for each group"),
    "linear_01": (OTHER, "dgrad uses the weight cast for fprop (a scale for each output row), instead of one cast along the other dimension"),
    "linear_02": (OTHER, "wgrad casts the gradient to E4M3 instead of E5M2"),
    "linear_03": (OTHER, "wgrad runs in high precision: its operands are not cast"),
    "linear_04": ("stale cache", "dgrad uses the weight of the previous call of this shape (a cache of the transpose that is not renewed)"),
    "linear_05": (OTHER, "wgrad sums over the first half of the tokens only"),
    "linear_06": (OTHER, "fprop runs in high precision: its operands are not cast"),
    "linear_07": (OTHER, "dgrad decodes the gradient with the scale of an E4M3 cast (448) though its codes are E5M2 (57,344)"),
    "linear_08": (OTHER, "fprop casts the weight with a scale for each row's 128 (1x128) instead of 128x128"),
    "attention_01": (OTHER, "scores are divided by D instead of its square root"),
    "attention_02": (OTHER, "dk lacks the factor 1 / sqrt(D)"),
    "attention_03": (OTHER, "scores are held in float16 and the softmax subtracts no maximum: large scores overflow, all are coarse"),
    "attention_04": (OTHER, "the backward of softmax leaves out the sum of p * dp"),
    "attention_05": (OTHER, "the backward does not apply the causal mask"),
    "attention_06": (OTHER, "keys are padded to a multiple of 16 and the padding is not masked: it takes a share of the softmax"),
    "attention_07": (OTHER, "a query sees the last 16 keys only (a sliding window)"),
    "attention_08": (OTHER, "dv is made of probabilities rounded to BF16"),
    "optimizer_01": (OTHER, "eps stands under the square root"),
    "optimizer_02": (OTHER, "the second moment lacks its bias correction"),
    "optimizer_03": (OTHER, "weight decay is added to the gradient (Adam with L2), not decoupled"),
    "optimizer_04": (OTHER, "weight decay is not multiplied by the learning rate"),
    "optimizer_05": (OTHER, "bias corrections are those of the next step (step + 1)"),
    "optimizer_06": (OTHER, "beta1 and beta2 are swapped"),
    "optimizer_07": (OTHER, "rows whose gradient is all zero are left as they are (lazy Adam): no decay, no moments"),
    "optimizer_08": (OTHER, "the first moment is stored in BF16"),
    "optimizer_09": (OTHER, "there is no weight decay"),
}


def main() -> None:
    """Writes the entries of all kernels, in the order of the files."""
    found = []
    for file in ("codes", "products"):
        module = importlib.import_module(file)
        for name, function in vars(module).items():
            if hasattr(function, "adapter_kind"):
                source, cause = CAUSES.get(name, (OTHER, ""))
                adapter = f"benchmarks/blind/kernels2/{Path(module.__file__ or '').name}:{name}"
                found.append({"name": name, "adapter": adapter, "kind": function.adapter_kind, "what": function.adapter_what,
                              "clean": name not in CAUSES, "source": source, "cause": cause})  # fmt: skip
    text = ",\n".join(json.dumps(entry) for entry in found)
    (Path(__file__).parent / "public.json").write_text(f"[\n{text}\n]\n", "utf-8")
    print(len(found), "kernels,", sum(not e["clean"] for e in found), "wrong")


if __name__ == "__main__":
    main()
