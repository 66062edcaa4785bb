"""The kernels: one file for each backend. A `supports_*` beside each operation says why it does not run.

`reference` is the truth: plain torch, any device. The others must give the same codes, scales and amax bit for bit, and
GEMMs within the rounding of one fp32 accumulation. `native` holds C++ kernels for a CPU, `triton` kernels for a GPU.

`ottava.ops.dispatch` chooses the kernel of a GEMM and `ottava.ops.quantize` that of a cast, from explicit tables. Their
protocols say what a file of a kernel has to have: `GemmKernel`, `DenseKernel`, `AccumulatingKernel`, `QuantizeKernel`.
"""
