"""Which weight of a file is which of the reference model: every one of both used once, every shape checked.

Readers say where each weight comes from; nothing is allocated before all of it fits.
"""

from __future__ import annotations

import fnmatch
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from reference_model import Transformer, TransformerConfig
from reference_model.model import PositionalEncoding, sinusoid_table
from tfm_export.errors import CheckpointError
from tfm_export.quotation import shorten, shorten_all

WEIGHT_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# A configuration may ask for a position table of any size, which is not in the file: 2^20 rows are beyond any use.
MOST_POSITIONS = 2**20
MISSING = torch.empty(0)  # stands for a weight that the file does not have
# Counters, tables of numbers 0, 1, 2 ..., masks and what training measures: kept beside weights, and none of them.
NOT_LEARNED = re.compile(
    r"(^|[._])(num_batches_tracked|position_ids|n_averaged|(\w*_)?mask|exp_avg(_sq)?|total|count)$"
)
MOST_NAMED = 40  # problems of one kind in a message


@dataclass
class KeyMap:
    """The weights of a file on their way into a reference model.

    Attributes:
        tensors: the file's, by name.
        placed: the reference model's, by name.
        used: names of the file that went somewhere.
        ignored: names of the file that are of no use, each with the reason.
        zeros: the reference model's weights that the file has none for and that are zero: absent biases.
        problems: what did not fit so far.
        origins: the name in the file of each of the reference model's weights.
        malformed: weights from which sizes should be told, and which have not the dimensions for it.
    """

    tensors: dict[str, Tensor]
    placed: dict[str, Tensor] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    ignored: dict[str, str] = field(default_factory=dict)
    zeros: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)
    malformed: dict[str, str] = field(default_factory=dict)

    def __contains__(self, key: str) -> bool:
        return key in self.tensors

    def size(self, key: str, axis: int, *, dimensions: int = 2) -> int:
        """A size that a weight of the file tells.

        A weight that is missing is told when it is placed, one of other dimensions, or without any numbers, is noted as
        malformed: 1 for both.
        """
        tensor = self.tensors.get(key)
        if tensor is None:
            return 1
        if tensor.dim() != dimensions or not tensor.numel():
            self.malformed[key] = (
                f"{key}: expected {dimensions} dimensions, none of them 0, found shape {list(tensor.shape)}"
            )
            return 1
        return tensor.size(axis)

    def put(
        self, targets: str | Sequence[str], key: str, change: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor | None:
        """Say that a weight of the file is one of the reference model, or several that are tied.

        Args:
            targets: names in the reference model.
            key: the name in the file.
            change: what to do with it, such as taking the rows that belong to the target.

        Returns:
            What was placed; None if the file has no such weight, which is a problem told later.
        """
        names = [targets] if isinstance(targets, str) else targets
        tensor = self.tensors.get(key)
        if tensor is None:
            self.problems.append(f"missing: {shorten(key)}, for {', '.join(names)}")
            self.placed |= dict.fromkeys(names, MISSING)  # told once is enough
            return None
        if key in self.used and change is None:
            self.problems.append(f"{key} is used twice")
        self.used.add(key)
        self.origins |= dict.fromkeys(names, key)
        try:
            changed = tensor if change is None else change(tensor)
        except (IndexError, RuntimeError, TypeError):  # too few dimensions, or too many: the check of shapes tells
            changed = tensor
        return self.put_tensor(names, changed)

    def put_tensor(self, targets: str | Sequence[str], tensor: Tensor) -> Tensor:
        """Place a tensor that is not in the file, such as a computed position table."""
        for name in [targets] if isinstance(targets, str) else targets:
            if name in self.placed:
                self.problems.append(f"{name} is filled twice")
            self.placed[name] = tensor
        return tensor

    def linear(self, target: str, key: str, change: Callable[[Tensor], Tensor] | None = None) -> None:
        """A linear layer: weight and bias of the file; without a bias in the file it is zero."""
        self.put(f"{target}.weight", f"{key}.weight", change)
        self.bias(f"{target}.bias", f"{key}.bias", change)

    def bias(self, target: str, key: str, change: Callable[[Tensor], Tensor] | None = None) -> None:
        """A bias, zero where the file has none."""
        if key in self.tensors:
            self.put(target, key, change)
        else:
            self.zeros.add(target)

    def norm(self, target: str, key: str, *, weight: str = "weight", bias: str | None = "bias") -> None:
        """A normalisation: weight and bias of the file; bias None where the kind of norm has none."""
        self.put(f"{target}.weight", f"{key}.{weight}")
        if bias is not None:
            self.bias(f"{target}.bias", f"{key}.{bias}")

    def ignore(self, keys: Iterable[str], reason: str) -> None:
        """Say that weights of the file are of no use."""
        self.ignored |= dict.fromkeys((key for key in keys if key in self.tensors), reason)

    def ignore_matching(self, patterns: Iterable[str], reason: str) -> None:
        """Say that weights are of no use, by names in which * stands for any characters."""
        for pattern in patterns:
            self.ignore(fnmatch.filter(self.tensors, pattern), reason)

    def unused(self) -> list[str]:
        """The names of the file that went nowhere."""
        return [key for key in self.tensors if key not in self.used and key not in self.ignored]

    def fitting_problems(self, config: TransformerConfig) -> list[str]:
        """Everything that keeps the weights from being those of a configuration, without allocating any of it."""
        if oversized := _oversized(config, len(self.tensors)):
            return [oversized]
        try:
            with torch.device("meta"):
                expected = {name: tuple(w.shape) for name, w in Transformer(config).state_dict().items()}
        except (RuntimeError, TypeError, OverflowError) as problem:
            return [f"the configuration has sizes that no memory holds: {str(problem).splitlines()[0]}"]
        problems = list(self.problems)
        parts = {key.split(".", maxsplit=1)[0] for key in self.used}
        problems += _cut(
            [f"nothing in the file is {name} {list(expected[name])}" for name in expected if not self._fills(name)]
        )
        problems += self._forgotten_biases()
        problems += _cut(
            [
                f"{n} {list(w.shape)} is no part of this configuration"
                for n, w in self.placed.items()
                if n not in expected
            ]
        )
        problems += _cut(
            [
                f"unexpected: {shorten(key)} {list(self.tensors[key].shape)}{_advice(key, parts)}"
                for key in self.unused()
            ]
        )
        checked: set[int] = set()
        for name, weight in self.placed.items():
            if name in expected and weight is not MISSING and (wrong := _problem_of(weight, expected[name], checked)):
                place = f"{self.origins[name]}, for {name}" if name in self.origins else name
                problems.append(f"{place}: {wrong}")
        return problems

    def _forgotten_biases(self) -> list[str]:
        """Biases that a file lacks while it has those of the same part elsewhere: there should be some."""
        kinds = {_part(name) for name in self.placed}
        return [f"missing: {name}, which other layers have" for name in self.zeros if _part(name) in kinds]

    def _fills(self, name: str) -> bool:
        return name in self.placed or name in self.zeros

    def build(self, config: TransformerConfig) -> Transformer:
        """The model in float32 and evaluation mode; `fitting_problems` must have found none.

        Weights that the file holds as float32 are not copied: they stay the file's, read when they are looked at.
        """
        with torch.device("meta"):
            empty = Transformer(config).state_dict()
        cast: dict[int, Tensor] = {}
        state = {}
        for name, weight in empty.items():
            if name in self.placed:
                source = self.placed[name]
                state[name] = cast.setdefault(id(source), source.detach().float().contiguous())
            else:
                state[name] = torch.zeros(weight.shape)
        return assemble(config, state)

    def notes(self) -> list[str]:
        """What was cast and ignored, for people."""
        cast = {self.tensors[key].dtype for key in self.used} & {*WEIGHT_TYPES} - {torch.float32}
        types = sorted(str(dtype).removeprefix("torch.") for dtype in cast)
        notes = [f"weights stored as {name} are computed with in float32" for name in types]
        reasons = dict.fromkeys(self.ignored.values())
        for reason in reasons:
            names = [key for key, why in self.ignored.items() if why == reason]
            notes.append(f"not used, {reason}: {shorten_all(names, 5)}")
        return notes


def assemble(config: TransformerConfig, state: Mapping[str, Tensor]) -> Transformer:
    """A model of weights that are there already, in evaluation mode; none of them is copied.

    Raises:
        RuntimeError: they are not those of the configuration.
    """
    with torch.device("meta"):
        model = Transformer(config)
    model.load_state_dict(state, assign=True)
    if config.tie_projection:
        model.projection.weight = model.target_embedding.weight
    for part in model.modules():
        if isinstance(part, PositionalEncoding) and config.positions == "sinusoidal" and part.table is not None:
            part.table = sinusoid_table(*part.table.shape)
    return model.eval()


def rows(start: int, stop: int | None) -> Callable[[Tensor], Tensor]:
    """A change that takes some rows of a weight."""
    return lambda tensor: tensor[start:stop]


def third(number: int) -> Callable[[Tensor], Tensor]:
    """A change that takes the query's (0), key's (1) or value's (2) rows of a joint projection.

    What has no three parts of one size is left whole, for the check of shapes to refuse: no row is dropped.
    """

    def change(tensor: Tensor) -> Tensor:
        count, rest = divmod(len(tensor), 3)
        return tensor if rest else tensor[number * count : (number + 1) * count]

    return change


def _advice(key: str, parts: Collection[str]) -> str:
    """How to leave out a weight that may be none of the model's.

    Args:
        key: its name.
        parts: the first parts of the names that are the model's.
    """
    first, _, rest = key.partition(".")
    if NOT_LEARNED.search(key):
        pattern = f"*{key.rsplit('.', maxsplit=1)[-1]}"
    elif first not in parts:
        pattern = f"{first}.*" if rest else first
    else:
        return ""
    return f" (if the model does not use it: --ignore-weights {shlex.quote(shorten(pattern))})"


def _part(name: str) -> str:
    """Which part a weight is, whatever its layer and stack: all norms are one part, and so are all attentions."""
    name = re.sub(r"^.*norm\.", "norm.", name)
    return re.sub(r"^(en|de)coder_layers\.\d+\.((self|cross)_)?", "", name)


def _oversized(config: TransformerConfig, tensors: int) -> str | None:
    if config.encoder_layers + config.decoder_layers > tensors:
        return f"the configuration has more layers than the file has tensors ({tensors})"
    for name in ("max_length", "longest_target"):
        if getattr(config, name) > MOST_POSITIONS:
            return f"{name} {getattr(config, name)} is more than {MOST_POSITIONS}"
    return None


def _problem_of(weight: Tensor, expected: tuple[int, ...], checked: set[int]) -> str | None:
    if tuple(weight.shape) != expected:
        return f"expected shape {list(expected)}, found {list(weight.shape)}"
    if weight.layout != torch.strided or weight.dtype not in WEIGHT_TYPES or weight.is_meta:
        return f"expected dense floating-point numbers, found {_form(weight)}"
    if id(weight) in checked:
        return None
    checked.add(id(weight))
    if count := int((~weight.float().isfinite()).sum()):
        return f"{count} of {weight.numel()} weights are not finite numbers in float32"
    return None


def _form(weight: Tensor) -> str:
    """What kind of tensor a weight is, for messages."""
    names = [str(weight.dtype), *([] if weight.layout == torch.strided else [str(weight.layout)])]
    return " ".join(name.removeprefix("torch.") for name in names) + (" without data" if weight.is_meta else "")


def _cut(problems: list[str]) -> list[str]:
    if len(problems) <= MOST_NAMED:
        return problems
    return [*problems[:MOST_NAMED], f"and {len(problems) - MOST_NAMED} more of this kind"]


def refuse(path: object, problems: Sequence[str], hint: str) -> CheckpointError:
    """The error that names all problems of a checkpoint."""
    first, *others = problems
    return CheckpointError([f"{path}: {first}", *others], hint)
