"""Tests of the kernels in C++."""
