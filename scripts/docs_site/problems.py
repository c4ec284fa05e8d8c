"""What is wrong with the documentation, as one error that names all of it. It holds words and decides nothing."""

from collections.abc import Sequence


class SiteError(Exception):
    """The site cannot be built; `problems` has a line for each cause, with file and remedy."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)
