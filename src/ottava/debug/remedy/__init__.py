"""From a symptom to a cure: one batch replayed with parts of the recipe off (`replay`, `probe`, `bisect`), layers put
under another recipe (`fallback`), loss spikes undone (`guard`)."""
