"""``python -m trainer.bench``: what sleeping and waking cost, per memory policy and beside other ways to offload.

Every case builds the real actor and critic in fresh workers, gives them an optimizer state, and lets them sleep and
wake up some times. Nothing is trained and no task is needed. :mod:`trainer.bench.peers` re-enacts how others offload.
"""
