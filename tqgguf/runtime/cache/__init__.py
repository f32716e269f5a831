"""A model's KV cache."""
