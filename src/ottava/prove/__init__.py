"""Proofs about other people's FP8 code. `ottava certify` runs a cast, GEMM, layer or optimizer step through a matrix of
hard cases.

    from ottava.prove import adapter

    @adapter("encode", format="e4m3")
    def mine(x): ...
"""

from ottava.prove.adapters import adapter

__all__ = ["adapter"]
