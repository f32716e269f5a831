"""One sequence: prompts, answers, chats."""
