"""Measurements of ottava beside its rivals on the machine at hand: ratios of interleaved rounds."""
