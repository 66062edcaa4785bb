"""What really computes: one file a backend, each with a `supports_*` beside each operation that says why not.

`reference` is the truth: plain torch, any device. The others must give the same codes, scales and amax bit for bit, and
GEMMs within the rounding of one fp32 accumulation. C++ files are built by `native_build` on first use. A kernel file is
a module with these names, or those of them that belong to what it does:

    NAME             what receipts call it
    NATIVE           whether FP8 operands stay FP8 inside the GEMM (False: emulated)
    supports_gemm    (a, b, out_dtype, bias) -> None, or the reason why not
    gemm             (a, b, out_dtype, bias, fast_accum) -> Tensor
    supports_quantize  (x, spec, scale) -> None, or the reason why not
    quantize         (x, spec, scale) -> Cast: codes, scale_inv, amax
    padding          (a, b) -> what it zero-pads, "" if nothing

and one that casts, with these:

    supports_quantize  (x, spec, scale) -> None, or the reason why not
    quantize           (x, spec, scale) -> reference.Cast

Which one runs is decided in `ops`, from an explicit tuple.
"""
