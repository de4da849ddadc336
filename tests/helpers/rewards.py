"""Rewards for runs of a few steps, whose models cannot answer yet."""

import zlib


def spread(response: str, example: object) -> float:
    """In [0, 1), drawn by the text of the response: whatever a model says, rewards differ from each other."""
    return zlib.crc32(response.encode()) % 8 / 8
