"""Rollouts of a policy, padded tensors -> **plan, steps** -> results in the caller's shape.

spans          where the tokens of each row are, from a mask or from lengths
arrays         tensors as arrays, for pickling
rollout_batch  the rows: samples without their padding, results with it
row_results    results by row -> their order, width and padding
rollout_plan   which rows run in which epoch, step, rank and micro-batch
"""
