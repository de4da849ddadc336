"""How batches are split, the passes and losses over them, and what makes experience of a rollout."""
