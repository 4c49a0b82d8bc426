"""A search engine of thirty lines: BM25, with the parameters WebShop's engine uses."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

_K1, _B = 0.9, 0.4


def words_of(text: str) -> list[str]:
    """Lower-case words of letters and digits."""
    return re.findall(r"[a-z0-9]+", text.lower())


class Index:
    """Finds texts by their words (Robertson and Zaragoza 2009, section 3)."""

    def __init__(self, texts: Sequence[str]) -> None:
        counts = [Counter(words_of(text)) for text in texts]
        lengths = [count.total() for count in counts]
        mean = sum(lengths) / max(1, len(lengths))
        self._weights: dict[str, list[tuple[int, float]]] = defaultdict(list)
        """The texts that contain each word, with its weight in each text."""
        frequencies = Counter(word for count in counts for word in count)
        for number, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            norm = _K1 * (1 - _B + _B * length / mean)
            for word, times in count.items():
                share = (len(texts) - frequencies[word] + 0.5) / (frequencies[word] + 0.5)
                weight = math.log1p(share) * times * (_K1 + 1) / (times + norm)
                self._weights[word].append((number, weight))

    def find(self, query: str, most: int) -> list[int]:
        """Numbers of the texts that match best, the best first; equal ones in order."""
        scores: dict[int, float] = defaultdict(float)
        for word in words_of(query):
            for number, weight in self._weights.get(word, ()):
                scores[number] += weight
        return sorted(scores, key=lambda number: (-scores[number], number))[:most]
