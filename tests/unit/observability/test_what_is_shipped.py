"""Dashboards and alerts are built here and are in no image: no shipped module may import them."""

import ast
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_wheel_is_without_dashboards_and_nothing_in_it_imports_them() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    shipped = [ROOT / package for package in packages["packages"]]
    assert not [package for package in shipped if package.name == "rlhf_observability"]
    modules = [path for package in shipped for path in package.rglob("*.py")]
    importing = {
        path.relative_to(ROOT)
        for path in modules
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
        if name.split(".")[0] in ("rlhf_observability", "grafana_foundation_sdk")
    }
    assert importing == set()
