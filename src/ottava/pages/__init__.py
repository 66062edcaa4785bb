"""The parts that all pages of ottava share: frame, style, line charts and tooltips."""
