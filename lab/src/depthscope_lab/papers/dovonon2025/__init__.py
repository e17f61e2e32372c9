"""Dovonon, Bronstein & Kusner 2025: the spectrum of H = W_V W_O decides whether tokens become equal."""
