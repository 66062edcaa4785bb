"""A weight that is stored only as codes and scales: the parameter, its operands, its state dict."""
