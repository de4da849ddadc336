"""Families of Hugging Face models: their names, files and FLOPs, without megatron."""
