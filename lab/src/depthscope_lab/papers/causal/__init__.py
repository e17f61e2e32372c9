"""Causal attention, which the papers leave out."""
