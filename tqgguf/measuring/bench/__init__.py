"""What a cache costs in time and memory."""

import tqgguf.runtime  # noqa: F401  (before mlx)
