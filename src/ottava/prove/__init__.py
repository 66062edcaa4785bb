"""Proofs about other people's numerics: certificates, differences, orders of additions, audits of cards."""
