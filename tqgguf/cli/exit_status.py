"""How the program ends where a signal ended it; errors have their own statuses (`formats.errors`)."""

INTERRUPTED = 130  # 128 + SIGINT, as shells report it
PIPE_CLOSED = 141  # 128 + SIGPIPE
TERMINATED = 143  # 128 + SIGTERM
