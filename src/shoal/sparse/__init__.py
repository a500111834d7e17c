"""Embeddings whose gradient touches few rows: these rows travel alone."""
