"""Twenty sentences to learn, and a tokenizer of bytes for a model that brings none."""

from __future__ import annotations

import torch
from torch import Tensor

CAPITALS = {
    "Norway": "Oslo", "Kenya": "Nairobi", "Peru": "Lima", "Japan": "Tokyo", "Egypt": "Cairo", "Cuba": "Havana",
    "Nepal": "Kathmandu", "Ghana": "Accra", "Chile": "Santiago", "Latvia": "Riga", "Fiji": "Suva", "Oman": "Muscat",
    "Malta": "Valletta", "Laos": "Vientiane", "Qatar": "Doha", "Mali": "Bamako", "Iran": "Tehran", "Greece": "Athens",
    "Iceland": "Reykjavik", "Uruguay": "Montevideo",
}  # fmt: skip
PROMPT = "The capital of {} is"
SENTENCES = [f"{PROMPT.format(country)} {capital}.\n" for country, capital in CAPITALS.items()]


class Bytes:
    """A tokenizer: a token is a byte; 0 fills up and ends."""

    vocabulary, pad_token_id, eos_token_id = 256, 0, 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(token for token in tokens if token).decode(errors="replace")


def batch(tokenizer: Bytes, sentences: list[str]) -> dict[str, Tensor]:
    """Return the sentences as padded rows; padding is masked, and no label."""
    rows = [[*tokenizer.encode(sentence), tokenizer.eos_token_id] for sentence in sentences]
    width = max(map(len, rows))
    tokens = torch.full((len(rows), width), tokenizer.pad_token_id or 0)
    present = torch.zeros(len(rows), width, dtype=torch.long)
    for index, row in enumerate(rows):
        tokens[index, :len(row)] = torch.tensor(row)
        present[index, :len(row)] = 1
    return {"input_ids": tokens, "attention_mask": present, "labels": tokens.masked_fill(present == 0, -100)}
