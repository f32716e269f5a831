"""llama.cpp's session and sequence files."""
