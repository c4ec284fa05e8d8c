"""Index over a few growing texts: finds earlier occurrences of a suffix and votes on its continuation.

For each of ORDERS a chain links the positions with equal preceding tokens, latest first (LZ77; Ziv and Lempel, 1977).
Rule: positions of the longest order with matches vote token by token, each with the weight of its text, while they
agree with the guess so far.
"""

from array import array
from bisect import bisect_right
from typing import Final, NamedTuple

from rlhf_common.samples import TokenArray

LONGEST_MATCH: Final = 32
"""Maximum tokens of a match."""
ORDERS: Final = (16, 8, 4, 2, 1)
"""Context lengths in tokens, longest first."""
LOOKED_AT: Final = 48
"""Maximum positions searched per chain."""
VOTERS: Final = 16
"""Maximum positions that vote: the latest of the longest matches."""
FOUND_AT_ONCE: Final = 256
"""Maximum tokens indexed per query; the rest waits for later queries."""
START: Final = array("i", [-1] * LONGEST_MATCH)
"""Filler before a text, in place of the prompt that all texts of an index share; no token is negative."""
SOMEWHERE: Final = array("i", [-2] * LONGEST_MATCH)
"""Filler before a text whose beginning is unknown."""
BYTES_PER_TEXT: Final = 1500
BYTES_PER_TOKEN: Final = 700
"""Estimate if no context occurs twice: five dictionary entries with two integers each, and the positions."""
_SHIFT: Final = 32
_OFFSET: Final = (1 << _SHIFT) - 1
_REACH: Final = tuple(2 * order - 1 if order < ORDERS[0] else LONGEST_MATCH for order in ORDERS)
"""Longest match to search for in each order; longer ones belong to the order before."""


class Text:
    """One text of an index."""

    __slots__ = ("aged", "earlier", "ends", "number", "weight", "written")

    def __init__(self, number: int, weight: float, before: "array[int]") -> None:
        self.number = number
        self.written = before[:]
        """Filler of LONGEST_MATCH entries, then the text's tokens."""
        self.weight = weight
        """Weight of tokens from the last of `ends` on."""
        self.ends: list[int] = []
        """Ends, in `written`, of the parts that were stored before each ageing; a part is not empty."""
        self.aged: list[float] = []
        """Weight of the tokens of each part in `ends`."""
        self.earlier: tuple[array[int], ...] = tuple(array("q") for _ in ORDERS)
        """For each order, an array: the previous position whose context has the same hash, -1 for none."""

    def __len__(self) -> int:
        """Return the number of its tokens."""
        return len(self.written) - LONGEST_MATCH


class Guess(NamedTuple):
    """A continuation with its support."""

    tokens: "array[int]"
    match: int
    """Context tokens that matched before it."""
    share: float
    """Weight of the positions that agree on its first token, over that of all voters plus one against."""


class SuffixIndex:
    """Texts that grow at their ends."""

    def __init__(self) -> None:
        self._texts: list[Text] = []
        self._latest: tuple[dict[int, int], ...] = tuple({} for _ in ORDERS)
        self._behind: dict[int, Text] = {}
        """Texts with tokens that are not indexed yet, by number."""

    def add(self, weight: float, before: "array[int]" = START) -> Text:
        """Return a new, empty text with this weight; `before` is START or SOMEWHERE."""
        text = Text(len(self._texts), weight, before)
        self._texts.append(text)
        self._make_findable(text, 1)
        return text

    def append(self, text: Text, tokens: TokenArray) -> None:
        """Append tokens, int32 [n], to a text."""
        text.written.extend(tokens.tolist())
        self._behind[text.number] = text

    def age(self, factor: float) -> None:
        """Reduce the weight of all stored tokens; later tokens have the full weight of their text."""
        for text in self._texts:
            text.aged = [weight * factor for weight in text.aged]
            if len(text.written) > (text.ends[-1] if text.ends else LONGEST_MATCH):
                text.ends.append(len(text.written))
                text.aged.append(text.weight * factor)

    def guess(self, context: "array[int]", longest: int) -> Guess | None:
        """Return the continuation of `context`, START and a text's tokens; None if no match is found. `longest`, at
        least 1, is the maximum length of the guess.
        """
        if self._behind:
            self._catch_up()
        tail = context[-LONGEST_MATCH:]
        encoded = tail.tobytes()
        for order, reach, latest, chain in zip(ORDERS, _REACH, self._latest, range(len(ORDERS)), strict=True):
            place = latest.get(hash(encoded[-4 * order :]), -1)
            if place >= 0:
                match, voters = self._voters(tail, place, order, reach, chain)
                if voters:
                    return _vote(voters, longest, match)
        return None

    def _catch_up(self) -> None:
        """Index tokens that are not indexed yet, at most FOUND_AT_ONCE."""
        left = FOUND_AT_ONCE
        while self._behind and left > 0:
            number, text = next(iter(self._behind.items()))
            left -= self._make_findable(text, left)
            if len(text.earlier[0]) > len(text):
                del self._behind[number]

    def _make_findable(self, text: Text, most: int) -> int:
        """Index further ends of a text by their contexts; return how many, at most `most`.

        The first end is before the first token, after the filler.
        """
        first = LONGEST_MATCH + len(text.earlier[0])
        last = min(first + most - 1, len(text.written))
        before = first - ORDERS[0]
        encoded = text.written[before:last].tobytes()
        for end in range(first, last + 1):
            place, stop = text.number << _SHIFT | end, 4 * (end - before)
            for order, latest, earlier in zip(ORDERS, self._latest, text.earlier, strict=True):
                context = hash(encoded[stop - 4 * order : stop])
                earlier.append(latest.get(context, -1))
                latest[context] = place
        return last - first + 1

    def _voters(
        self, tail: "array[int]", place: int, order: int, reach: int, chain: int
    ) -> tuple[int, list[tuple[Text, int]]]:
        """Return the longest match, and the text and offset of up to VOTERS matching positions, latest first."""
        wanted = tail[-order:]
        best = order
        voters: list[tuple[Text, int]] = []
        for _ in range(LOOKED_AT):
            text, offset = self._texts[place >> _SHIFT], place & _OFFSET
            tokens = text.written
            if offset < len(tokens) and tokens[offset - order : offset] == wanted:
                match = order
                while match < reach and tokens[offset - match - 1] == tail[-match - 1]:
                    match += 1
                if match > best:
                    best, voters = match, []
                if match == best and len(voters) < VOTERS:
                    voters.append((text, offset))
            place = text.earlier[chain][offset - LONGEST_MATCH]
            if place < 0:
                break
        return best, voters


def _vote(voters: list[tuple[Text, int]], longest: int, match: int) -> Guess:
    guess = array("i")
    share = 0.0
    while voters and len(guess) < longest:
        if len(voters) == 1:  # nothing is left to disagree
            text, offset = voters[0]
            if not guess:
                share = _weight(text, offset) / (_weight(text, offset) + 1)
            guess.extend(text.written[offset : offset + longest - len(guess)])
            break
        says: dict[int, float] = {}
        for text, offset in voters:
            token = text.written[offset]
            says[token] = says.get(token, 0.0) + _weight(text, offset)
        chosen = max(says, key=says.__getitem__)  # the latest of equals, as dictionaries keep their order
        if not guess:
            share = says[chosen] / (sum(says.values()) + 1)
        guess.append(chosen)
        voters = [
            (text, offset + 1)
            for text, offset in voters
            if text.written[offset] == chosen and offset + 1 < len(text.written)
        ]
    return Guess(guess, match, share)


def _weight(text: Text, offset: int) -> float:
    if not text.ends or offset >= text.ends[-1]:
        return text.weight
    return text.aged[bisect_right(text.ends, offset)]
