"""What is measured of a running step: phases and their memory, rates, metrics, traces."""
