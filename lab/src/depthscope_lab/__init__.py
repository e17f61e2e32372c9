"""What trains: recipes, the fair comparison, and the papers recomputed. Built on `depthscope`, the instrument."""
