"""What a cache costs: in quality, in time and in memory. The names of what is compared need no MLX."""
