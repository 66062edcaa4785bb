"""Measures ottava and other packages on this machine: ratios of interleaved rounds."""
