"""What really computes: one file a backend, each with a `supports_*` beside each operation that says why not.

`reference` is the truth: plain torch, any device. The others must give the same codes, scales and amax bit for bit, and
GEMMs within the rounding of one fp32 accumulation. `native` holds what is compiled from C++, `triton` what runs on a
GPU. A kernel that multiplies is a module with these names:

    NAME                    what receipts call it
    NATIVE                  whether FP8 operands stay FP8 inside the GEMM (False: emulated)
    supports_gemm           (a, b, out_dtype, bias) -> None, or the reason why not
    gemm                    (a, b, out_dtype, bias, fast_accum) -> Tensor
    padding                 (a, b) -> what it zero-pads, "" if nothing

and with these, if it has them:

    plan_gemm               (a, b, out_dtype, bias, fast_accum) -> (a, b, bias) -> Tensor, for all operands like these
    ways                    (a, b, out_dtype, bias, fast_accum) -> {its configurations: calls}, for `ops.tune_gemm`
    SOURCES                 names of the files beside it that it is made of, if not its own file alone
    reads_scales            (a, b) -> whether numbers among the scales decide what `supports_gemm` says

A kernel that multiplies matrices in high precision has NAME and these:

    supports_dense          (a, b) -> None, or the reason why not
    plan_dense              (a, b, bias) -> (a, b, bias) -> Tensor of their dtype, for all matrices like these

A kernel that casts has NAME and these:

    supports_quantize       (x, spec, scale) -> None, or the reason why not
    quantize                (x, spec, scale) -> reference.Cast: codes, scale_inv, amax
    plan_quantize           optional: (x, spec) -> ((x, scale, staged) -> reference.Cast), for all x like this one

Which kernel runs is decided in `ottava.dispatch` for GEMMs and in `ottava.casts` for casts, from explicit tables.
"""
