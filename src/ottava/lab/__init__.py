"""Compares recipes as an experiment does: several seeds, paired with BF16, every claim with its interval."""
