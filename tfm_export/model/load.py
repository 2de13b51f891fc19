"""From a bundle's folder to a model in service."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tfm_export.bundle import DEFAULT_PATH, TOKENIZER, Bundle
from tfm_export.decoding.request import are_ids, is_real
from tfm_export.errors import RequestError
from tfm_export.graph import GENERATE
from tfm_export.model.model import MAX_WAITING, Model
from tfm_export.model.observer import Observer
from tfm_export.model.requests import SPECIAL_TOKENS, SpecialTokens
from tfm_export.pinned_folder import pinned_folder
from tfm_export.quotation import quote
from tfm_export.runtime.backends import Backend, BackendChoice, DeviceName, backend_choices, open_backend
from tfm_export.tokenizer import load_tokenizer


def load(
    path: str | Path = DEFAULT_PATH,
    *,
    backend: Backend = "auto",
    device: DeviceName = None,
    variant: str | None = None,
    draft: str | None = None,
    threads: int | None = None,
    check_hashes: bool = True,
    special_tokens: SpecialTokens = "read",
    workers: int | None = None,
    max_waiting: int = MAX_WAITING,
    observer: Observer | None = None,
    copy: bool | None = None,
) -> Model:
    """Load a bundle on the first backend that runs here; `tfm_export.runtime.backends` has the order.

    >>> import tfm_export
    >>> with tfm_export.load("tfm_bundle") as model:
    ...     print(model.generate("hello").text)
    HH EH L OW

    Args:
        path: the bundle's folder.
        backend: "onnxruntime" or "tensorrt" for no other; "auto" for any.
        device: the number of a GPU, or "cuda:0", or "cpu", for no other; None for any.
        variant: the precision. None is fp32 with ONNX Runtime, and an engine of any precision. "auto" is the fastest
            that was made for a CPU, by the speeds that the bundle records (`Bundle.fastest_variant`), or an engine.
        draft: another precision that guesses the next tokens of greedy search and sampling: the same tokens sooner,
            where a step of up to 4 sentences costs what reading the weights costs. Only the CPU is left then. See
            docs/decoding.md.
        threads: threads to compute with on a CPU; None for the CPUs this process may use.
        check_hashes: read every file that may be used and compare its hash with the manifest's; of all others, and
            otherwise, only sizes are compared.
        special_tokens: "escape" special tokens, such as "</s>", that texts spell, as a public service should, unless a
            call says otherwise; "read" takes them as the tokenizer's own library does.
        workers: batches that `generate_async` decodes at the same time; None for as many as have CPUs of their own.
        max_waiting: sources that may wait for `generate_async`; more are refused with `Overloaded`.
        observer: told what `generate_async` does.
        copy: for a CPU, read the weights into memory, where no change of their file reaches them. Otherwise those that
            the CPU uses as they are in the file are mapped, which takes less memory. None copies up to 64 MB. See
            docs/decoding.md.

    Raises:
        BackendUnavailable: a library, a driver or a GPU is missing; it says which, and what to do.
        BundleError: it is not a bundle, is damaged or of a newer format, or has no such variant.
        RequestError: an argument means nothing, or threads is less than 1.
    """
    if special_tokens not in SPECIAL_TOKENS:
        raise RequestError(f"special_tokens must be one of {', '.join(SPECIAL_TOKENS)}, found {special_tokens!r}")
    _check_types(path, variant=variant, draft=draft, copy=copy, check_hashes=check_hashes)
    _check_service(max_waiting, observer)
    path = Path(path)
    with pinned_folder(path) as folder:
        bundle = Bundle.open(path, check_hashes=False, folder=folder)
        if check_hashes:
            ways = backend_choices(bundle, backend=backend, device=device, variant=variant, draft=draft)
            bundle.check(_files_used(bundle, ways))
        tokenizer = load_tokenizer(bundle)
        chosen, step_model = open_backend(
            bundle, backend=backend, device=device, variant=variant, draft=draft, threads=threads, copy=copy
        )
        bundle.folder = bundle.path
    return Model(
        bundle,
        step_model,
        tokenizer,
        backend=str(chosen),
        special_tokens=special_tokens,
        workers=workers,
        max_waiting=max_waiting,
        observer=observer,
    )


def _check_types(path: object, **given: object) -> None:
    """Refuse arguments of other types than they should have."""
    if not isinstance(path, str | Path):
        raise RequestError(f"path must be that of a bundle's folder, found {quote(path)}")
    for name, value in given.items():
        is_text = name in {"variant", "draft"}
        kind, what = (str, "a name") if is_text else (bool, "true or false")
        if not isinstance(value, kind) and not (value is None and name != "check_hashes"):
            raise RequestError(f"{name} must be {what}, found {quote(value)}")


def _check_service(max_waiting: object, observer: object) -> None:
    if not (is_real(max_waiting) and are_ids([max_waiting]) and max_waiting >= 1):
        raise RequestError(f"max_waiting must be an integer of at least 1, found {quote(max_waiting)}")
    if observer is not None and not isinstance(observer, Observer):
        raise RequestError(f"observer must be a tfm_export.Observer, found {quote(observer)}")


def _files_used(bundle: Bundle, ways: Iterable[BackendChoice]) -> list[str]:
    """The files of a bundle that ways to run it read: a service waits until their hashes are known."""
    folders = [
        folder
        for way in ways
        for folder in ([f"onnx/{of}/" for of in way.variants] if way.engine is None else [f"engines/{way.engine}/"])
    ]
    used = (f"{TOKENIZER}/", *folders)
    return [n for n in bundle.manifest.files if n.startswith(used) and not n.endswith(f"/{GENERATE}")]
