"""What a tokenizer's ids mean, as a hash: ``tools/preprocess_data.py`` writes it beside the data that it encodes, and
a run compares it with the tokenizer on its command line. Imports nothing heavy, so that both can."""

import json
from collections.abc import Mapping
from hashlib import blake2b


def hash_of_sentencepiece(model: bytes) -> str:
    """The hash of a model file's content."""
    return blake2b(model, digest_size=16).hexdigest()


def hash_of_vocabulary(vocabulary: Mapping[str, int], end: str | None) -> str:
    """The hash of each token's id, and of the token that ends a document.

    Rules by which text is cut do not count: libraries write them down in another way from version to version, and a
    refusal for that would stop a run whose data is right."""
    pairs = sorted(vocabulary.items(), key=lambda pair: (pair[1], pair[0]))
    return blake2b(json.dumps([pairs, end]).encode(), digest_size=16).hexdigest()
