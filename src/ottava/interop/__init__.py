"""Files of other tools, read safely: TransformerEngine's state, logs and settings; TensorBoard's events."""
