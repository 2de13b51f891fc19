"""Other ways to run the same weights: what we are compared with, in speed and in tokens."""
