"""Cures: replay a batch with parts of the recipe off, give layers another recipe, undo loss spikes."""
