"""The engine of ``rollout=native``."""
