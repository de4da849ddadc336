"""A role: model, optimizer and weights backuper, and how they sleep and wake up."""
