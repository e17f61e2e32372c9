"""The commands that train, as `depthscope` finds them: `train`, `compare`, `reproduce`, `tour`."""
