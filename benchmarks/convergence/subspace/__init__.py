"""Subspace pipelines of real processes, against the free decoder, codes of all its numbers, and other boundaries."""
