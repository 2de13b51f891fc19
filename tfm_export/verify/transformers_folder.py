"""A folder of Hugging Face as the library transformers itself runs it, where that is installed.

Nothing is fetched, no code of the folder is run, and pickles may hold weights only.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tfm_export.bundle import Manifest
from tfm_export.checkpoints.files import CONFIG
from tfm_export.checkpoints.generation_keys import KEYS
from tfm_export.json_text import parse_json
from tfm_export.quotation import quote, shorten
from tfm_export.text_files import read_text

# Settings of ours that say something else than the folder does, and what they are to transformers.
SETTINGS = {
    "beam_size": "num_beams",
    "length_penalty": "length_penalty",
    "pad": "pad_token_id",
    "bos": "decoder_start_token_id",
    "eos": "eos_token_id",
}
DEFAULT_NEW_TOKENS = 20  # of a target, where nothing says how long it may be


class CannotRun(Exception):
    """Why transformers does not run a folder."""


class TransformersFolder:
    """A model of transformers with the folder's own defaults of generation.

    Args:
        folder: with config.json.
        manifest: of the bundle that was made of it.
        most_tokens: the longest target, whatever the defaults say.

    Attributes:
        version: of transformers.
        limit: the longest target, where it is not the one that the defaults say.
        draws: the defaults draw tokens; here the best is taken.
        tokenizer: theirs; None until `load_tokenizer`.
        notes: what of the defaults was not followed, for people.

    Raises:
        CannotRun: transformers cannot run the folder.
    """

    def __init__(self, folder: Path, manifest: Manifest, *, most_tokens: int) -> None:
        self._folder, self.notes = folder, list[str]()
        self.tokenizer: Any = None
        self._library = _library()
        self.version: str = self._library.__version__
        self._model = self._load()
        self.draws: bool = self._model.generation_config.do_sample is True
        self.limit = self._follow(manifest, most_tokens)

    def load_tokenizer(self) -> None:
        """Load the folder's tokenizer.

        Raises:
            CannotRun: transformers has no tokenizer for it.
        """
        with _quiet(), self._told("cannot load the tokenizer of the folder"):
            loader = self._library.AutoTokenizer
            self.tokenizer = loader.from_pretrained(str(self._folder), local_files_only=True, trust_remote_code=False)

    def encode(self, text: str) -> list[int]:
        """The ids of a source text."""
        assert self.tokenizer is not None, "there is a tokenizer"
        with _quiet():
            ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids

    def decode(self, tokens: Sequence[int], *, clean: bool | None = None) -> str:
        """The text of a target.

        Args:
            tokens: its ids.
            clean: whether spaces before punctuation go; None does as the tokenizer says.
        """
        assert self.tokenizer is not None, "there is a tokenizer"
        options = {} if clean is None else {"clean_up_tokenization_spaces": clean}
        with _quiet():
            text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True, **options)
        return text

    def names(self, tokens: Sequence[int]) -> list[str]:
        """The names of tokens."""
        assert self.tokenizer is not None, "there is a tokenizer"
        names: list[str] = self.tokenizer.convert_ids_to_tokens(list(tokens))
        return names

    def generate(self, ids: Sequence[int]) -> list[int]:
        """The target of a source, without the start token, with the end token if it came.

        Raises:
            CannotRun: their code fails.
        """
        import torch

        source = torch.tensor([list(ids)])
        with _quiet(), torch.inference_mode(), self._told("fails on the folder"):
            try:
                output = self._model.generate(input_ids=source, attention_mask=torch.ones_like(source))
            except (IndexError, AttributeError):
                # Some versions' caches have as many layers as the encoder.
                config = self._model.generation_config
                if config.use_cache is False:
                    raise
                config.use_cache = False
                return self.generate(ids)
        found: list[int] = output[0, 1:].tolist()
        ends = self._model.generation_config.eos_token_id
        places = [i for i, token in enumerate(found) if token in (ends if isinstance(ends, list) else [ends])]
        return found[: places[0] + 1] if places else found

    def _load(self) -> Any:
        import torch

        # Weights that are stored in 16 bits, and tables that are computed, are in float32 as the reference model's.
        dtype = "dtype" if int(self.version.split(".")[0]) >= 5 else "torch_dtype"
        with _quiet(), self._told("cannot load the folder"):
            model, info = self._library.AutoModelForSeq2SeqLM.from_pretrained(
                str(self._folder),
                local_files_only=True,
                trust_remote_code=False,
                weights_only=True,
                output_loading_info=True,
                **{dtype: torch.float32},
            )
        if missing := sorted(info["missing_keys"]):
            raise CannotRun(
                f"transformers {self.version} draws weights at random that it misses: {shorten(missing[0])}"
            )
        return model.eval()

    def _follow(self, manifest: Manifest, most_tokens: int) -> int | None:
        """Leave out what a bundle's defaults leave out, and set what its settings say."""
        config, settings = self._model.generation_config, manifest.model.get("settings", {})
        neutral = type(config)()
        ignored = settings.get("ignore_generation", [])
        for name, key in KEYS.items():
            value = getattr(config, name, None)
            left_out = name in ignored or (key.treatment in ("noted", "refused") and value not in key.neutral)
            if left_out and value is not None and value != getattr(neutral, name, None):
                setattr(config, name, getattr(neutral, name, None))
                self.notes.append(f"compared with transformers without {name} {quote(value)}, which is not applied")
        if self.draws:
            config.do_sample = False
            self.notes.append("compared with transformers with do_sample false: the best token is taken, none is drawn")
        for name, theirs in SETTINGS.items():
            if name in settings and settings[name] != getattr(config, theirs, None):
                setattr(config, theirs, settings[name])
                self.notes.append(f"compared with transformers with {theirs} {quote(settings[name])}, as given")
        self._know_ids(manifest)
        return self._end(manifest, most_tokens)

    def _know_ids(self, manifest: Manifest) -> None:
        """Give transformers the special ids that it does not find where it looks for them."""
        config, special = self._model.generation_config, manifest.special_ids
        if config.pad_token_id is None:
            config.pad_token_id = special.pad
        lacks = {"eos_token_id": special.eos}
        if config.bos_token_id is None:
            lacks["decoder_start_token_id"] = special.bos
        for name, value in lacks.items():
            if getattr(config, name) is None:
                setattr(config, name, value)
                self.notes.append(f"compared with transformers with {name} {value}, which it does not read")

    def _end(self, manifest: Manifest, most_tokens: int) -> int | None:
        config = self._model.generation_config
        least: int = manifest.generation.options.get("min_decoding_length", 0)
        most = min(manifest.limits.max_target_length, max(most_tokens, least))
        longest = config.max_new_tokens or (config.max_length and config.max_length - 1) or DEFAULT_NEW_TOKENS
        if longest <= most:
            return None
        config.max_new_tokens = most
        return most

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except CannotRun:
            raise
        except Exception as problem:  # anything: this is their code
            reason = next((line.strip() for line in str(problem).splitlines() if line.strip()), type(problem).__name__)
            raise CannotRun(f"transformers {self.version} {what}: {shorten(reason)}") from problem


def is_transformers_folder(path: Path) -> bool:
    """Whether a checkpoint is a folder that names a type of model of theirs."""
    try:
        config: object = parse_json(read_text(path / CONFIG))
    except (OSError, ValueError):
        return False
    return isinstance(config, Mapping) and "model_type" in config


def _library() -> Any:
    if find_spec("transformers") is None:
        raise CannotRun("transformers is not installed (pip install transformers)")
    try:
        import transformers
    except Exception as problem:  # its releases do not go with every release of what it needs
        raise CannotRun(f"transformers cannot be imported: {shorten(str(problem))}") from problem
    return transformers


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what transformers logs, draws and warns of out of the command's output."""
    from transformers import utils

    logging: Any = utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
