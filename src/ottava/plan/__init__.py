"""What a training run will need, predicted before it runs: memory, wires and time."""
