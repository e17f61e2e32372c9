"""A small plug-in for depthscope, as another package would write it (`tests/test_plug_in.py` installs it)."""
