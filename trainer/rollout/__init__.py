"""Engines that draw responses from the actor's weights, behind one protocol."""
