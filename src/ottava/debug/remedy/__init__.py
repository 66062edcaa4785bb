"""Cures: replay one batch with parts of the recipe off (`replay`, `probe`, `bisect`), give layers another recipe
(`fallback`), undo loss spikes (`guard`)."""
