"""What tokenizers of one generation of Llama have in common, whatever file describes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

# Llama 3's published pattern for cutting a text into words.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def llama3_words() -> PreTokenizer:
    """Cuts a text into words as Llama 3 does, and writes their bytes as characters."""
    from tokenizers import Regex, pre_tokenizers

    split = pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def begin_with(backend: Tokenizer, bos: str, bos_id: int) -> None:
    """Lets every text begin with the token `bos`."""
    from tokenizers import processors

    backend.post_processor = processors.TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", f"{bos}:1", "$B:1"], special_tokens=[(bos, bos_id)]
    )


def space_in_front(backend: Tokenizer) -> None:
    """Puts a space before every text, as SentencePiece does; transformers does only where there is none yet."""
    from tokenizers import normalizers

    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
