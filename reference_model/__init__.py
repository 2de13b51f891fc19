"""The encoder-decoder Transformer of "Attention Is All You Need", to read in one sitting.

Start with `model.py`; `config.py` holds its sizes, `checkpoint.py` its file, `train.py` its training loop and
`search.py` a deliberately naive way of decoding with it. The package needs torch and nothing else.
"""

from reference_model.checkpoint import Checkpoint, GenerationDefaults, SpecialIds, load_checkpoint, save_checkpoint
from reference_model.config import TransformerConfig
from reference_model.model import Transformer
from reference_model.vocabulary import Vocabulary

__all__ = [
    "Checkpoint",
    "GenerationDefaults",
    "SpecialIds",
    "Transformer",
    "TransformerConfig",
    "Vocabulary",
    "load_checkpoint",
    "save_checkpoint",
]
