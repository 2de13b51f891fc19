"""Take a trained encoder-decoder Transformer from PyTorch into production.

>>> import tfm_export
>>> model = tfm_export.load("tfm_bundle")  # doctest: +SKIP
"""
