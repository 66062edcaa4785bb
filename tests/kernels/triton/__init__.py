"""Tests of the kernels in Triton."""
