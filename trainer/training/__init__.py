"""Batches of a step, how they are split, and the passes and losses over them."""
