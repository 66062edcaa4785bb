"""The reference trainer behind `ottava train` and `ottava demo`."""
