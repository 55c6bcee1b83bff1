"""Readers of the official on-disk formats; one file for each benchmark, the shared types in `base`.

Every reader returns a `Dataset` (items of images × texts) or a `RetrievalDataset` (queries against
candidates), says which edition it found, counts what is missing, and refuses what cannot be paired. Nothing
is downloaded: the folders are the user's.
"""
