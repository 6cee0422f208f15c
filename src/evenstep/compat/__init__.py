"""Other systems' names over the layers below: **their call** -> ours. Nothing is decided here.

cosmos_rl   ShardedIterableDataset, LoadBalancedDataset
"""
