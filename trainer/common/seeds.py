"""The seed of every random draw, keyed by what is drawn."""

import hashlib


def seed_for(seed: int, purpose: str, *, step: int = 0, rank: int = 0) -> int:
    """The seed of one random draw, in [0, 2^31). Keyed by what is drawn and not by what was drawn before, so that a
    resumed run draws what the unbroken one would have."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{step}/{rank}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
