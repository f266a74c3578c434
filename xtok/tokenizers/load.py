"""From a folder, a hub id or a transformers tokenizer to a checked `TokenizerAdapter`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from xtok.errors import TokenizerError
from xtok.tokenizers.adapter import ROLE_NAMES, TokenizerAdapter
from xtok.tokenizers.files import TokenizerFiles, read_tokenizer_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["adapt_tokenizer", "load_tokenizer", "same_tokenizer"]

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

    tokenizer: a folder or URL with tokenizer.json, or a hub id (with `revision`). trust_remote_code: accepted for symmetry with
    transformers; no code of a tokenizer repository is ever run. backend: who encodes; "auto" takes fastokens where it loads.
    TokenizerError: no tokenizer.json, a slow tokenizer, ids beyond the declared vocabulary, an unknown post-processor.
    """
    files = read_tokenizer_files(tokenizer, revision=revision)
    adapter = _adapter_of_files(tokenizer, files)
    choose_backend(adapter, backend)
    return adapter


def choose_backend(adapter: TokenizerAdapter, backend: BackendName) -> None:
    """Set who encodes for `adapter`: "fastokens" raises where it refuses the tokenizer, "auto" then takes the reference."""
    if backend not in ("auto", "fastokens", "tokenizers"):
        raise TokenizerError(f"backend {backend!r} is none of auto, fastokens, tokenizers")
    adapter.backend = adapter.reference
    if backend == "tokenizers":
        return
    try:
        adapter.backend = adapter.fast_backend()
    except TokenizerError:
        if backend == "fastokens":
            raise


def adapt_tokenizer(tokenizer: PreTrainedTokenizerBase) -> TokenizerAdapter:
    """Adapter of a transformers tokenizer, which is copied, never modified; remembered as long as the tokenizer lives.

    TypeError for what is no tokenizer, TokenizerError for a slow one.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    if not isinstance(backend, Tokenizer):
        if not hasattr(tokenizer, "convert_ids_to_tokens"):
            raise TypeError(f"a transformers tokenizer is wanted, not a {type(tokenizer).__name__}")
        raise TokenizerError(
            f"{name} ({type(tokenizer).__name__}) is a slow tokenizer; load its fast form (PreTrainedTokenizerFast, tokenizer.json)"
        )
    roles = {role: str(text) for role in ROLE_NAMES if (text := getattr(tokenizer, role, None)) is not None}
    template = tokenizer.chat_template
    template = template.get("default") if isinstance(template, dict) else template
    state = (len(tokenizer), tuple(sorted(roles.items())), template)
    known = _ADAPTERS.get(tokenizer)
    if known is not None and known[0] == state:
        return known[1]
    copy = _without_limits(Tokenizer.from_str(backend.to_str()))
    adapter = TokenizerAdapter(copy, name=str(name), special_tokens=roles, chat_template=template)
    _ADAPTERS[tokenizer] = (state, adapter)
    return adapter


def same_tokenizer(left: TokenizerAdapter, right: TokenizerAdapter) -> bool:
    """Whether two tokenizers have one content fingerprint: same ids for every text, same template, same roles."""
    return left.content_fingerprint == right.content_fingerprint


def _adapter_of_files(name: str, files: TokenizerFiles) -> TokenizerAdapter:
    try:
        tokenizer = Tokenizer.from_buffer(files.tokenizer_json)
    except Exception as error:
        raise TokenizerError(f"{name}: tokenizer.json cannot be loaded ({error})") from error
    _without_limits(tokenizer)
    roles = _add_role_tokens(tokenizer, files.config)
    _set_post_processor(tokenizer, files.config, roles)
    return TokenizerAdapter(
        tokenizer,
        name=name,
        special_tokens=roles,
        chat_template=files.chat_template,
        declared_vocab_size=files.declared_vocab_size,
    )


def _without_limits(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = False
    return tokenizer


def _add_role_tokens(tokenizer: Tokenizer, config: dict[str, Any]) -> dict[str, str]:
    """Make every role token of the configuration a special token, as transformers does. Returns role name -> text."""
    roles: dict[str, str] = {}
    additions = []
    for role in ROLE_NAMES:
        token = _added_token(config.get(role))
        if token is not None:
            roles[role] = token.content
            additions.append(token)
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    values = extra.values() if isinstance(extra, dict) else extra
    additions.extend(token for value in values if (token := _added_token(value)) is not None)
    tokenizer.add_special_tokens(additions)
    return roles


def _added_token(value: Any) -> AddedToken | None:
    if isinstance(value, str):
        return AddedToken(value, special=True, normalized=False)
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        flags = {flag: bool(value[flag]) for flag in ("lstrip", "rstrip", "single_word", "normalized") if flag in value}
        return AddedToken(value["content"], special=True, **flags)
    return None


def _set_post_processor(tokenizer: Tokenizer, config: dict[str, Any], roles: dict[str, str]) -> None:
    """`add_bos_token` and `add_eos_token` of the configuration overrule the tokenizer's own template, as in transformers."""
    if tokenizer.post_processor is not None and not {"add_bos_token", "add_eos_token"} & config.keys():
        return
    bos = roles.get("bos_token") if config.get("add_bos_token") else None
    eos = roles.get("eos_token") if config.get("add_eos_token") else None
    single = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    pair = [*single, *([f"{bos}:1"] if bos else []), "$B:1", *([f"{eos}:1"] if eos else [])]
    specials = [(text, tokenizer.token_to_id(text)) for text in dict.fromkeys((bos, eos)) if text]
    tokenizer.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=specials)
