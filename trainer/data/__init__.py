"""Which examples go into which step on which rank, and their tokens."""
