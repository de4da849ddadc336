"""What several test modules share; test modules import from here and never from each other."""
