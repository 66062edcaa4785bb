"""Numbers as data: formats, rounding, scales, transforms, accumulators, and the quantized tensor."""
