"""Retrieval: an index of images that are found by late interaction, kept safely on disk.

`engine.retrieval.index.Index` is what users see. Below it, `storage` is the folder with its commits, `snapshot` what
one commit holds, `segment` a piece of it in mapped files, `scan` the exact search.
"""
