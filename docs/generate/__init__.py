"""The source -> **the reference pages**: command line, configuration, interface.

`python -m docs.generate` writes them into `docs/reference`; `tests/docs` checks that they are
current.
"""
