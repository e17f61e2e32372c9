"""The study as `depthscope reproduce` lists it; nothing heavy is imported."""

from depthscope_lab.papers import Entry

ENTRY = Entry("soft-mean", "example_plug_in.study", "a mean in the place of attention", "a second")
