"""Batch -> **loss, gradient**. Everything here is torch.

model   a small decoder that takes a `Batch` and nothing else
"""
