"""Studies of models with very many blocks."""
