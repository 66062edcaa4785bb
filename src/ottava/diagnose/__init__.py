"""Compares runs, explains them, and predicts other recipes from their statistics."""
