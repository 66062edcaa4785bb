"""Names that other packages' scripts know, on ottava's engine."""
