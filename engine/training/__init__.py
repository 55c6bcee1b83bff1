"""Training of the embedded model and of small heads on frozen features."""
