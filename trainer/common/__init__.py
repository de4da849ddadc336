"""What any folder may use and what knows nothing of reinforcement learning: files, units, seeds."""
