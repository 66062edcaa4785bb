"""The kernels: one file for each backend. A `supports_*` beside each operation says why it does not run.

`reference` is the truth: plain torch, any device. The others must give the same codes, scales and amax bit for bit, and
GEMMs within the rounding of one fp32 accumulation. `native` holds C++ kernels for a CPU, `triton` kernels for a GPU. A
kernel that multiplies is a module with these names:

    NAME                    its name in receipts
    NATIVE                  whether FP8 operands stay FP8 inside the GEMM (False: emulated)
    supports_gemm           (a, b, out_dtype, bias) -> None, or the reason why not
    plan_gemm               (a, b, out_dtype, bias, fast_accum) -> (a, b, bias) -> Tensor, for all operands like these
    gemm                    in its place: (a, b, out_dtype, bias, fast_accum) -> Tensor

and with these optional ones:

    padding                 (a, b) -> the zero-padded sizes, "" if none
    ways                    (a, b, out_dtype, bias, fast_accum) -> {its configurations: calls}, for `ops.gemm.tune_gemm`
    SOURCES                 names of its files, if it has more than one
    reads_scales            (a, b) -> whether the answer of `supports_gemm` depends on numbers among the scales

A kernel that multiplies matrices in high precision has NAME and these:

    supports_dense          (a, b) -> None, or the reason why not
    plan_dense              (a, b, bias) -> (a, b, bias) -> Tensor of their dtype, for all matrices like these

A kernel that casts has NAME and these:

    supports_quantize       (x, spec, scale) -> None, or the reason why not
    plan_quantize           (x, spec) -> ((x, scale, staged) -> reference.Cast), for all x like this one
    quantize                in its place: (x, spec, scale) -> reference.Cast: codes, scale_inv, amax

`ottava.ops.dispatch` chooses the kernel of a GEMM and `ottava.ops.quantize` that of a cast, from explicit tables.
"""
