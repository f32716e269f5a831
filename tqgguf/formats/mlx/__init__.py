"""mlx-lm's prompt caches, and MLX's quantisation. Nothing here imports MLX."""
