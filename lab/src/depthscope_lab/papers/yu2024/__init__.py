"""Yu & Zhang 2024, "Why classic Transformers are shallow and how to make them go deep" (arXiv 2312.06182)."""
