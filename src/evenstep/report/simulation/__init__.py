"""Plan -> **seconds of each step on a cluster**. Pure functions over arrays; nothing here plans.

schedule   the order of forwards and backwards on each pipeline stage
pipeline   when each of them starts and ends
exchange   what ranks send to each other, and how much of it shows
cluster    the speed of devices and links
device     the time of a model's micro-batch on a GPU
simulate   the time of each step, divided into work, padding, bubbles, waiting and exchange
memory     the bytes that a model and its micro-batch take
tuning     rows of a sweep, and which to recommend
"""
