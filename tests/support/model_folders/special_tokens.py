"""Tokenizers of tests that add special tokens to a text, as those of published models do."""

from typing import Any, Final

from tests.support.model_folders.models import build_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

BOS: Final = "<bos>"


def tokenizer_that_writes(single: str, *more: str) -> Any:
    """Return the tests' tokenizer with special tokens `more` and a post-processor such as "<bos> $A <eos>"."""
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"bos_token": BOS})
    tokenizer.add_tokens(list(more), special_tokens=True)
    added = [(name, tokenizer.convert_tokens_to_ids(name)) for name in {*single.split()} - {"$A"}]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=f"{single} $B", special_tokens=added
    )
    return tokenizer


def byte_tokenizer(chat_template: str) -> Any:
    """Return a tokenizer with a token for each byte, as byte-level models have; text -> ids -> text is exact."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    result = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", clean_up_tokenization_spaces=False)
    result.chat_template = chat_template
    return result
