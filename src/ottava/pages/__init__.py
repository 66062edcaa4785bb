"""The parts that all HTML pages of ottava share: frame, style, line charts and tooltips."""
