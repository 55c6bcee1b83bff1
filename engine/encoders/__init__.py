"""Frozen encoders: the embedded `scenes` model, open_clip and transformers, all with the same features."""
