"""`python -m rlhf_observability.alerts` writes every file generated from the alerts (`make alerts`).

Rule: the output depends on the families and on the text around the generated part of a file.
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
