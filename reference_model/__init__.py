"""The encoder-decoder Transformer of "Attention Is All You Need", to read in one sitting.

Start with `model.py`; `config.py` holds its sizes, `checkpoint.py` its file, `training.py` its training loop (run by
`train.py`), `search.py` a deliberately naive way of decoding with it and `evaluate.py` how often it is right. The
package needs torch; training and evaluating draw their progress bars with tqdm.
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
