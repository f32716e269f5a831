"""GGUF to GGUF."""
