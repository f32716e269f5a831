"""What a KV cache holds, apart from any file, and our GGUF carrier of it."""
