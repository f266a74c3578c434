"""From a folder, a hub id or a transformers tokenizer to a checked `TokenizerAdapter`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args
from weakref import WeakKeyDictionary

from tokenizers import Tokenizer

from xtok.errors import ConfigError, TokenizerError
from xtok.tokenizers.adapter import TokenizerAdapter
from xtok.tokenizers.configure import apply_config, without_limits
from xtok.tokenizers.files import TokenizerFiles, read_tokenizer_files
from xtok.tokenizers.memory import release_freed_memory
from xtok.tokenizers.roles import ROLE_NAMES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["BackendName", "adapt_tokenizer", "choose_backend", "load_tokenizer", "same_tokenizer"]

BackendName = Literal["auto", "fastokens", "tokenizers"]
_ADAPTERS: WeakKeyDictionary[Any, tuple[object, TokenizerAdapter]] = WeakKeyDictionary()


def load_tokenizer(
    tokenizer: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    backend: BackendName = "tokenizers",
) -> TokenizerAdapter:
    """Load and check a tokenizer.

    tokenizer: a folder or URL with tokenizer.json, or a hub id (with `revision`). trust_remote_code: accepted as transformers
    accepts it, but no code of a tokenizer repository is ever run: tokenizer.json says all. backend: who encodes; "auto" takes
    fastokens where it loads (prove it with `prove_backend` on your data), "fastokens" insists.
    TokenizerError: no tokenizer.json, a slow tokenizer, ids beyond the declared vocabulary, an unknown post-processor.
    """
    del trust_remote_code
    _check_backend(backend)
    adapter = _adapter_of_files(tokenizer, read_tokenizer_files(tokenizer, revision=revision))
    release_freed_memory()  # before the next large load
    choose_backend(adapter, backend)
    return adapter


def choose_backend(adapter: TokenizerAdapter, backend: BackendName) -> None:
    """Set who encodes for `adapter`: "fastokens" raises where it refuses the tokenizer, "auto" then takes the reference."""
    _check_backend(backend)
    adapter.backend = adapter.reference
    if backend == "tokenizers":
        return
    try:
        adapter.backend = adapter.fast_backend()
    except TokenizerError:
        if backend == "fastokens":
            raise


def adapt_tokenizer(tokenizer: PreTrainedTokenizerBase) -> TokenizerAdapter:
    """Adapter of a transformers tokenizer, which is copied, never modified.

    Remembered as long as the tokenizer lives and nothing of it but truncation and padding is changed. TypeError for what is no
    tokenizer, TokenizerError for a slow one.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    name = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
    if not isinstance(backend, Tokenizer):
        if not hasattr(tokenizer, "convert_ids_to_tokens"):
            raise TypeError(f"a transformers tokenizer is wanted, not a {type(tokenizer).__name__}")
        raise TokenizerError(
            f"{name} ({type(tokenizer).__name__}) is a slow tokenizer: it tells no offsets; "
            "load its fast form (PreTrainedTokenizerFast, tokenizer.json)"
        )
    roles = {role: str(text) for role in ROLE_NAMES if (text := getattr(tokenizer, role, None)) is not None}
    template: Any = tokenizer.chat_template
    template = template.get("default") if isinstance(template, dict) else template
    state = (len(tokenizer), tuple(sorted(roles.items())), template, backend.encode_special_tokens, _component_states(backend))
    known = _ADAPTERS.get(tokenizer)
    if known is not None and known[0] == state:
        return known[1]
    copy = without_limits(Tokenizer.from_str(backend.to_str()))
    copy.encode_special_tokens = backend.encode_special_tokens
    adapter = TokenizerAdapter(copy, name=name, special_tokens=roles, chat_template=template)
    release_freed_memory()
    _ADAPTERS[tokenizer] = (state, adapter)
    return adapter


def same_tokenizer(left: TokenizerAdapter, right: TokenizerAdapter) -> bool:
    """Whether two tokenizers have one content fingerprint: same ids for every text, same template, same roles."""
    return left is right or left.content_fingerprint == right.content_fingerprint


def _adapter_of_files(name: str, files: TokenizerFiles) -> TokenizerAdapter:
    try:
        tokenizer = Tokenizer.from_buffer(files.tokenizer_json)
    except Exception as error:
        raise TokenizerError(f"{name}: tokenizer.json cannot be loaded ({error})") from error
    roles = apply_config(without_limits(tokenizer), files.config)
    return TokenizerAdapter(
        tokenizer,
        name=name,
        special_tokens=roles,
        chat_template=files.chat_template,
        declared_vocab_size=files.declared_vocab_size,
    )


def _component_states(tokenizer: Tokenizer) -> tuple[bytes | None, ...]:
    """What a user may set on a living tokenizer (`add_bos_token` sets the post-processor)."""
    parts = (tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.post_processor)
    return tuple(None if part is None else part.__getstate__() for part in parts)


def _check_backend(backend: str) -> None:
    if backend not in get_args(BackendName):
        raise ConfigError(f"backend is {backend!r}; it must be one of {', '.join(get_args(BackendName))}")
