"""Kernels in Triton on a GPU. Nothing here imports Triton before the first launch; the device code does."""
