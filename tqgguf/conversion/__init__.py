"""Models from one kind of file to another, without MLX: GGUF to GGUF, Hugging Face checkpoints to GGUF."""
