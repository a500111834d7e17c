"""Sparse gradients: embeddings whose gradient touches few rows exchange these rows instead of whole tables."""
