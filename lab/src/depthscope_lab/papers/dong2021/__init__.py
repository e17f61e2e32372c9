"""Dong, Cordonnier & Loukas 2021: pure attention loses rank doubly exponentially with depth (arXiv 2103.03404)."""
