"""Kernels in C++ on a CPU: `build` compiles src/NAME.cpp on first use, and the module NAME calls it through ctypes."""
