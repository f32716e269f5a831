"""GGUF files: reading within bounds, the rules of the format, writing."""
