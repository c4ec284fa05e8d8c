"""Writes every dashboard as a file that Grafana imports: `python -m rlhf_observability.dashboards FOLDER`.

Rule: afterwards the folder has no other files named *.json, so that a removed dashboard leaves the chart.
"""

import sys
from pathlib import Path

from rlhf_observability.dashboards import all_dashboards, file_name
from rlhf_observability.dashboards.document import document


def main(folder: Path) -> None:
    """Write all dashboards into a folder, and remove its other files named *.json."""
    folder.mkdir(parents=True, exist_ok=True)
    documents = {file_name(dashboard): document(dashboard) for dashboard in all_dashboards()}
    for path in folder.glob("*.json"):
        if path.name not in documents:
            path.unlink()
    for name, text in documents.items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
