"""The part of TransformerEngine that its frameworks share: recipes."""

from ottava.compat.transformer_engine.common import recipe

__all__ = ["recipe"]
