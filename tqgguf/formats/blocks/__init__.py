"""Values to blocks and back: cache types, their numbers, their codecs."""
