"""Regions of memory that sleep: the saver, host arenas, keepers, and the ledger of what they hold."""
