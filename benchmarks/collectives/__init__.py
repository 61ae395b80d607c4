"""Collectives on one machine."""
