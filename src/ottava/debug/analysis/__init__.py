"""What statistics of a run mean: compared, explained, and predicted for other recipes."""
