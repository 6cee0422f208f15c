"""What `make demo` runs: a small decoder, trained three ways on the Python standard library."""
