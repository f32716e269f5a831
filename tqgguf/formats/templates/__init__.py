"""Chat templates: Jinja from strangers' files, rendered in a process of its own."""
