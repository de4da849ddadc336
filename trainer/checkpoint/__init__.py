"""Checkpoints of a run: what is in them (:mod:`.state`), as which rectangles of tensors (:mod:`.pieces`), in what torch
calls a distributed checkpoint (:mod:`.storage`), how ranks write one together (:mod:`.writing`), and folders that are
complete or absent (:mod:`.folder`)."""
