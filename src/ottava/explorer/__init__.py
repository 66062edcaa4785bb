"""A page that computes with the engine's rules in the browser: casts, GEMMs, a training. It needs no network."""
