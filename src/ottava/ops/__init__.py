"""The two operations, quantize and gemm: their plans, and the kernels that run them."""
