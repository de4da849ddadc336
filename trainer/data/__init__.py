"""Which examples go into which step on which rank, their tokens, and the batches that a step works on."""
