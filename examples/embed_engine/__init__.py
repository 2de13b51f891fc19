"""A service around a bundle: requests from many threads, decoded together. See README.md."""
