"""Dong, Cordonnier & Loukas 2021, "Attention is not all you need" (arXiv 2103.03404)."""
