"""The FLOPs of models from their configurations.

config           read a configuration: a path, a mapping or an object
kinds            the model types that are understood
layers           attention and feed-forward of each layer
text, vision     a language model, a vision tower
presets          well-known models by name
work             matrix and attention work, added up
"""
