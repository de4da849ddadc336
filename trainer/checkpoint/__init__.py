"""Checkpoints of a run: what is in them (:mod:`.state`) and folders that are complete or absent (:mod:`.folder`)."""
