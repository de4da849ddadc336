"""The parent's side: what Hydra calls, a job's folder, and the launch of its workers. Never imports megatron."""
