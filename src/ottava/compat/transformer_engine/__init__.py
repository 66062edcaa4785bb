"""TransformerEngine's PyTorch interface on ottava: a script runs after one changed import.

    import ottava.compat.transformer_engine.pytorch as te
    from ottava.compat.transformer_engine.common.recipe import DelayedScaling, Format

or unchanged, with this package in TransformerEngine's place:

    python -m ottava.compat.transformer_engine script.py --its-own-arguments

If ottava lacks a name, using it raises an error that names a replacement; no setting is
ignored. docs/from_transformer_engine.md lists all names.
"""

from ottava.compat.transformer_engine import common, pytorch

__all__ = ["__version__", "common", "pytorch"]

__version__ = "2.20.0"
"""Of the TransformerEngine whose names these are; Megatron Core asks for it."""
