"""Rendered scenes with known content: vocabulary and splits, pixels, captions and benchmark items.

``world`` says what may be in a scene and which combinations are held out, ``render`` draws it and makes
training batches, ``captions`` says what is to be seen, ``items`` builds the controlled benchmark.
"""
