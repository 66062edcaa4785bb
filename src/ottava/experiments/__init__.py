"""Experiments with a running training: replay a batch or steps in another way, compare, and leave no trace."""
