"""What runs a recipe: autocast, quantizers, the formulas of forward and backward, predicted scales."""
