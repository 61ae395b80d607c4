"""Subspace pipelines."""
