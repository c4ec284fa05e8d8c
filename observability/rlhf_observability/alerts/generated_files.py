"""Files generated from the alerts, with their text: `make alerts` writes them, a test compares them.

Rule: reads the files that have a generated part between other parts; writes nothing.
"""

import json
from pathlib import Path

from rlhf_observability.alerts import chart_values, reference_page
from rlhf_observability.alerts.families import FAMILIES
from rlhf_observability.alerts.rule_file import chart_data, rule_file_text


def generated_files(root: Path) -> dict[Path, str]:
    """Return path -> text of each generated file."""
    chart, page = root / "charts" / "rlhf-operator", root / "docs" / "alerts.md"
    values, schema = chart / "values.yaml", chart / "values.schema.json"
    return {
        chart / "alerts" / "alerts.json": json.dumps(chart_data(FAMILIES), indent=1, ensure_ascii=False) + "\n",
        chart / "alerts" / "rlhf-operator.rules.yaml": rule_file_text(FAMILIES),
        values: chart_values.with_section(values.read_text(), FAMILIES),
        schema: chart_values.with_schema(schema.read_text(), FAMILIES),
        page: reference_page.with_tables(page.read_text(), FAMILIES),
    }
