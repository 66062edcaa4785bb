"""Watches a training run: settings, the schedule of looks, taps into modules and casts, sums and displays."""
