"""What TransformerEngine's frameworks share: recipes."""

from ottava.compat.transformer_engine.common import recipe

__all__ = ["recipe"]
