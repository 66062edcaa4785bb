"""Doors: thin plug-ins into other people's trainers; each imports its host only when it is used."""
