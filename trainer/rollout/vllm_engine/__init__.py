"""The engine ``rollout=vllm``: what it holds, its draws, and vLLM in the training process."""
