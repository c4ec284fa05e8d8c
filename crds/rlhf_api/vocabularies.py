"""Where two vocabularies differ. Rule: a token is the same in both only where it has the same id; sizes say nothing."""

from collections.abc import Mapping


def difference(theirs: Mapping[str, int], policy: Mapping[str, int], *, exact: bool = True) -> str:
    """Return the first token, by id, that another model's vocabulary has otherwise than the policy's; empty: none.

    `exact`: whether a token that the policy lacks is a difference, too.
    """
    for token, number in sorted(policy.items(), key=lambda item: (item[1], item[0])):
        if theirs.get(token) != number:
            said = "does not have it" if token not in theirs else f"gives it the number {theirs[token]}"
            return f"the policy's token {number} is {token!r}, and its tokenizer {said}"
    extra = min((token for token in theirs if token not in policy), key=lambda token: theirs[token], default=None)
    return f"its tokenizer has the token {extra!r}, which the policy's has not" if exact and extra is not None else ""
