"""Where samples come from and where we are: source -> **steps with a cursor**. No torch here.

order    position in an epoch -> sample, without an array
"""
