"""`python -m docs_site [FOLDER]`: builds the site into FOLDER, or site/ of the repository; stderr has the problems.

It owns the exit code alone, and must decide nothing about pages.
"""

import sys
from pathlib import Path

from .build import build
from .problems import SiteError

ROOT = Path(__file__).parents[2]


def main() -> int:
    """Return the exit code."""
    site = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "site"
    try:
        built = build(ROOT, site)
    except SiteError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{site}/index.html: {built.pages} pages, {built.bytes / 1e6:.1f} MB, no problem found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
