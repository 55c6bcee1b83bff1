"""Frozen encoders and trained heads written as ONNX graphs, in folders that check themselves."""
