"""Frozen vision-language encoders in, fine-grained image-text scores out."""
