"""Batching: which samples share a micro-batch.

dynamic, cuts  sorted rows are divided where the width grows
in_order       the next samples while the bounds hold
selection      the next micro-batch out of a pool
"""
