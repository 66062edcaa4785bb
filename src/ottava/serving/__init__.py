"""Checkpoints for inference engines: what a trained forward multiplied, in the layout that an engine reads."""
