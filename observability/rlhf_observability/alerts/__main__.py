"""`python -m rlhf_observability.alerts` writes every file that is made of the alerts (`make alerts`).

Rule: what is written is a function of the families and of what the file had around its generated part.
"""

from pathlib import Path
from typing import Final

from rlhf_observability.alerts.generated_files import generated_files

ROOT: Final = Path(__file__).parents[3]


def main() -> None:
    """Write them."""
    for path, text in generated_files(ROOT).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
