# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Token sequences whose continuation is known, so that one teacher-forced reading scores it; seeded, without network.

Greedy decoding gives a known answer exactly if, along it, each of its tokens is the most likely one. So recall needs
no generation.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..calibration.data import fingerprint
from ..registration import cache_argument
from .methods import exact_cache


#: Tokens of text before words to recall: more than anybody's exact sinks.
RECALL_LEAD = 64

_NUMBER_DIGITS = 4


@dataclass(frozen=True)
class Items:
    """Sequences to be read through caches, all of one length; padding comes first.

    Args:
        ids: [rows, tokens].
        start: the first token that is scored.
        answers: int64 [rows, tokens - start], the number of the answer that a token belongs to, from 1 on; 0 for
            tokens that do not count.
        mask: [rows, tokens], 0 for padding; None if there is none.
        prefill: how many tokens go in at once, as a prompt.
    """

    ids: torch.Tensor
    start: int
    answers: torch.Tensor
    mask: torch.Tensor | None = None
    prefill: int = 0

    @property
    def counts(self) -> torch.Tensor:
        """bool [rows, tokens - start]: which tokens count."""
        return self.answers > 0

    def right(self, hit: torch.Tensor) -> list[bool]:
        """Of each answer, whether all of its tokens are hit.

        Args:
            hit: bool [rows, tokens - start].
        """
        pairs = zip(self.answers, hit)
        return [bool(h[a == k].all()) for a, h in pairs for k in range(1, int(a.max()) + 1)]

    @property
    def fingerprint(self) -> str:
        """sha256 of the tokens."""
        return fingerprint(self.ids)


def common_words(text: str, count: int = 400) -> list[str]:
    """The most frequent words of 4 to 8 small letters, the most frequent first."""
    return [word for word, _ in Counter(re.findall(r"\b[a-z]{4,8}\b", text)).most_common(count)]


def text_items(text: str, tokenizer: PreTrainedTokenizerBase, tokens: int, rows: int = 1) -> Items:
    """The first tokens of a text, or as many consecutive parts of it.

    Raises:
        ValueError: the text is too short.
    """
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids
    if ids.shape[1] < tokens * rows:
        raise ValueError(f"the text has {ids.shape[1]} tokens, but {rows} x {tokens} are wanted; give more text")
    return _all_count(ids[:, : tokens * rows].reshape(rows, tokens), 1)


def copy_items(words: list[str], tokenizer: PreTrainedTokenizerBase, rows: int, length: int, seed: int = 0) -> Items:
    """Random words, and the same words again: the second time counts. Each row has words of its own.

    Args:
        words: to choose from.
        tokenizer: the model's tokenizer.
        rows: number of sequences.
        length: words of each.
        seed: which words.
    """
    lists = _word_lists(words, rows, length, seed)
    tokens = [_tokens(tokenizer, f" {' '.join(row)}") for row in lists]
    # Which word comes first, nobody can know.
    return _padded([(part + part[:1], [(1, part[1:])]) for part in tokens])


def recall_items(
    words: list[str], filler: torch.Tensor, tokenizer: PreTrainedTokenizerBase, length: int, seed: int = 0
) -> Items:
    """Random words, then so much text that they have long left every exact window, and the same words again.

    Text comes before them, too, so that no exact sink holds some of them.

    Args:
        words: to choose from.
        filler: [rows, tokens] of text, of which `RECALL_LEAD` come before the words.
        tokenizer: the model's tokenizer.
        length: words to recall.
        seed: which words.
    """
    lists = _word_lists(words, len(filler), length, seed)
    tokens = [_tokens(tokenizer, f" {' '.join(row)}") for row in lists]
    return _padded(
        [
            (text[:RECALL_LEAD] + part + text[RECALL_LEAD:] + part[:1], [(1, part[1:])])
            for part, text in zip(tokens, filler.tolist())
        ]
    )


def phone_book_items(
    words: list[str], tokenizer: PreTrainedTokenizerBase, rows: int, entries: int, seed: int = 0
) -> Items:
    """A list of words with numbers of four digits, and all the words again in another order: each number is an answer.

    Args:
        words: to choose from.
        tokenizer: the model's tokenizer.
        rows: number of sequences.
        entries: lines of each list.
        seed: which words and numbers, and in which order they are asked for.
    """
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for names in _word_lists(words, rows, entries, seed):
        numbers = torch.randint(10 ** (_NUMBER_DIGITS - 1), 10**_NUMBER_DIGITS, (entries,), generator=generator)
        lines = [
            (_tokens(tokenizer, f"\n{name}:"), _tokens(tokenizer, f" {n}")) for name, n in zip(names, numbers.tolist())
        ]
        book = [token for line in lines for part in line for token in part]
        asked = [lines[i] for i in torch.randperm(entries, generator=generator).tolist()]
        pieces = [(k * is_answer, part) for k, line in enumerate(asked, 1) for is_answer, part in enumerate(line)]
        parts.append((_tokens(tokenizer, "The phone book:") + book + _tokens(tokenizer, "\n\nAgain:"), pieces))
    return _padded(parts)


def generated_items(model: PreTrainedModel, prompts: torch.Tensor, new_tokens: int) -> Items:
    """The exact model's own greedy continuation of prompts; all of it counts.

    Args:
        model: a causal language model.
        prompts: [rows, tokens].
        new_tokens: tokens to generate, no more and no less.
    """
    config = GenerationConfig(
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=model.generation_config.eos_token_id,
        pad_token_id=model.generation_config.pad_token_id,
    )
    prompts = prompts.to(model.device)
    ids = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        generation_config=config,
        **{cache_argument(model): exact_cache(model)},
    )
    return _all_count(ids.cpu(), prompts.shape[1], prefill=prompts.shape[1])


def _word_lists(words: list[str], rows: int, length: int, seed: int) -> list[list[str]]:
    if len(words) < length:
        raise ValueError(f"the text has {len(words)} different words, but {length} are wanted; give more text")
    generator = torch.Generator().manual_seed(seed)
    return [[words[i] for i in torch.randperm(len(words), generator=generator)[:length].tolist()] for _ in range(rows)]


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


def _all_count(ids: torch.Tensor, start: int, prefill: int = 0) -> Items:
    return Items(ids, start, torch.ones_like(ids[:, start:]), prefill=prefill)


def _padded(parts: list[tuple[list[int], list[tuple[int, list[int]]]]]) -> Items:
    """Rows of context and pieces, each with the number of the answer that it is, padded in front."""
    rows = [(context, [(k, token) for k, piece in pieces for token in piece]) for context, pieces in parts]
    longest = max(len(context) + len(scored) for context, scored in rows)
    most = max(len(scored) for _, scored in rows)
    ids, mask = (torch.zeros(len(rows), longest, dtype=torch.long) for _ in range(2))
    answers = torch.zeros(len(rows), most, dtype=torch.long)
    for row, (context, scored) in enumerate(rows):
        tokens = context + [token for _, token in scored]
        ids[row, -len(tokens) :], mask[row, -len(tokens) :] = torch.tensor(tokens), 1
        answers[row, -len(scored) :] = torch.tensor([k for k, _ in scored])
    return Items(ids, longest - most, answers, None if mask.all() else mask)
