"""Many random blocks at once, as plain functions of tensors: what the studies of theory are computed with.

`randomness.py` draws numbers, `weights.py` the weights of blocks in the size that a study configures, `blocks.py` is
Algorithm 1 of Yu & Zhang 2024 with its siblings, `collapse_rate.py` reads how fast a curve of t_div falls.
"""
