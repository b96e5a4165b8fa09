"""The rooms of the house: who may import whom, how long a file may be, what it may be called.

``LEVELS`` is the line of the architecture, from the ground up. A room may import rooms below it and, with the
exceptions that are checked here, rooms on its own level. Every import counts, also one inside a function.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEVELS = (
    {"dims", "errors", "config", "config_files"},
    {"devices"},
    {"d3d_kernels", "models"},
    {"checkpoints", "acceptance"},
    {"data", "training", "pruning", "decoding"},
    {"benchmarks", "serving", "demo"},
    {"cli"},
)
LEVEL_OF = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
APART = {"training", "decoding"}
PACKAGES = {"d3d_jax": "d3d_jax", "d3d_kernels": "kernels/d3d_kernels"}
LINE_LIMITS = {"d3d_jax": 400, "kernels": 600, "scripts": 400, "tests": 400}
VAGUE_NAMES = {"utils.py", "helpers.py", "common.py", "misc.py"}


def room_of(module: str) -> str | None:
    """The room that a dotted name lies in: None for other libraries and for the bare package ``d3d_jax``."""
    package, *rest = module.split(".")
    if package == "d3d_kernels":
        return package
    if package == "d3d_jax" and rest and rest[0] not in ("__init__", "__version__"):
        return rest[0]
    return None


def imported_modules(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that the code of `module` imports, relative imports resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: None if is_package else -1]
                parents = parents[: len(parents) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def imports(root: Path) -> Iterator[tuple[str, str, str]]:
    """(place, module, imported name) of all code; the place is ``file:line``."""
    for package, folder in PACKAGES.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = [package, *path.relative_to(root / folder).with_suffix("").parts]
            is_package = parts[-1] == "__init__"
            module = ".".join(parts[:-1] if is_package else parts)
            for line, name in imported_modules(ast.parse(path.read_text("utf-8")), module, is_package):
                yield f"{path.relative_to(root)}:{line}", module, name


def arrows(root: Path) -> Iterator[tuple[str, str, str]]:
    """(place, room, imported room) for every import that leaves a room."""
    for place, module, name in imports(root):
        source, target = room_of(module) or module.split(".")[0], room_of(name)
        if target is not None and target != source:
            yield place, source, target


def circle(graph: dict[str, set[str]]) -> str:
    """A circle of the graph in words; empty when there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " <- ".join(error.args[1])
    return ""


def circle_of_files(root: Path) -> str:
    """Modules that import each other in a circle, also from inside functions; a package's face is not counted."""
    found = [(module, name) for _, module, name in imports(root)]
    modules, graph = {module for module, _ in found}, {}
    for module, name in found:
        target = name if name in modules else name.rpartition(".")[0]
        if target in modules - {module, *PACKAGES}:
            graph.setdefault(module, set()).add(target)
    return circle(graph)


def wrong_arrows(root: Path) -> list[str]:
    """A sentence for every import that the architecture does not allow."""
    faults, graph = [], {}
    for place, source, target in arrows(root):
        fault = None
        if source == "d3d_jax":
            fault = "the package itself imports nothing, so that importing it stays light"
        elif source == "d3d_kernels":
            fault = "the kernels know arrays and masks, nothing of d3d_jax"
        elif source not in LEVEL_OF or target not in LEVEL_OF:
            fault = "a room without a level; give it one in LEVELS"
        elif {source, target} == APART:
            fault = "training and decoding never import each other"
        elif LEVEL_OF[target] > LEVEL_OF[source]:
            fault = "an arrow that runs back; move the code down, or hand it in as an argument"
        else:
            graph.setdefault(source, set()).add(target)
        if fault:
            faults.append(f"{place}: {source} imports {target}: {fault}")
    if found := circle(graph):
        faults.append(f"rooms import each other in a circle: {found}")
    return faults


def unknown_rooms(root: Path) -> list[str]:
    """Rooms of d3d_jax that have no level, and rooms with code that are no packages."""
    faults = []
    for path in sorted((root / "d3d_jax").iterdir()):
        has_code = path.suffix == ".py" or any(path.rglob("*.py"))
        if not has_code or path.name == "__init__.py":
            continue
        if path.stem not in LEVEL_OF:
            faults.append(f"d3d_jax/{path.name} has no level; give it one in LEVELS")
        if path.is_dir() and not (path / "__init__.py").is_file():
            faults.append(f"d3d_jax/{path.name} has no __init__.py")
    return faults


def unwelcome_files(root: Path) -> list[str]:
    """Python files that are too long, or whose name says nothing."""
    faults = []
    for folder, limit in LINE_LIMITS.items():
        for path in sorted((root / folder).rglob("*.py")):
            where, lines = path.relative_to(root), len(path.read_text("utf-8").splitlines())
            if lines > limit:
                faults.append(f"{where} has {lines} lines; {limit} at most, so find the second noun in it")
            if path.name in VAGUE_NAMES:
                faults.append(f"{where}: name the file after what it holds")
    return faults


def test_no_arrow_runs_back():
    assert wrong_arrows(ROOT) == []


def test_no_files_import_each_other_in_a_circle():
    assert circle_of_files(ROOT) == ""


def test_every_room_has_a_level_and_is_a_package():
    assert unknown_rooms(ROOT) == []


def test_files_are_short_and_named_after_what_they_hold():
    assert unwelcome_files(ROOT) == []


def test_the_walk_sees_the_packages():
    """An empty walk would make every test above pass."""
    assert {"models", "training"} <= {source for _, source, _ in arrows(ROOT)}


def plant(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_allowed_arrows_pass(tmp_path):
    plant(
        tmp_path,
        {
            "d3d_jax/__init__.py": "from __future__ import annotations\nimport os",
            "d3d_jax/config.py": "from d3d_jax.errors import ConfigError\nfrom d3d_jax import __version__",
            "d3d_jax/models/qwen3.py": "import d3d_kernels\nfrom ..config import ModelConfig\nfrom . import cache",
            "d3d_jax/pruning/progressive.py": "from d3d_jax.training import loss",
            "d3d_jax/cli/demo.py": "from d3d_jax.decoding import engine\nimport d3d_jax.training.loop",
            "kernels/d3d_kernels/attention.py": "from d3d_kernels.xla import attend\nfrom .intervals import Intervals",
        },
    )
    assert wrong_arrows(tmp_path) == []


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("d3d_jax/__init__.py", "from d3d_jax.models import qwen3", "stays light"),
        ("d3d_jax/config.py", "import d3d_jax.devices.mesh", "config imports devices: an arrow that runs back"),
        ("d3d_jax/models/qwen3.py", "from d3d_jax import checkpoints", "models imports checkpoints: an arrow"),
        (
            "d3d_jax/models/qwen3.py",
            "def f():\n    from ..decoding.state import S",
            "qwen3.py:2: models imports dec",
        ),
        ("d3d_jax/models/__init__.py", "from ..cli import main", "models imports cli"),
        (
            "d3d_jax/data/loader.py",
            "import importlib\nimportlib.import_module('d3d_jax.cli.main')",
            "loader.py:2: ",
        ),
        ("d3d_jax/training/loop.py", "from d3d_jax.decoding import engine", "never import each other"),
        ("d3d_jax/decoding/engine.py", "if x:\n    import d3d_jax.training", "never import each other"),
        ("kernels/d3d_kernels/xla.py", "from d3d_jax.config import ModelConfig", "nothing of d3d_jax"),
        ("d3d_jax/models/qwen3.py", "from d3d_jax.tools import x", "models imports tools: a room without a level"),
    ],
)
def test_a_planted_violation_is_caught(tmp_path, file, text, said):
    plant(tmp_path, {file: text})
    (fault,) = wrong_arrows(tmp_path)
    assert said in fault


def test_a_planted_circle_between_rooms_is_caught(tmp_path):
    plant(
        tmp_path,
        {
            "d3d_jax/data/loader.py": "import d3d_jax.pruning.influence",
            "d3d_jax/pruning/influence.py": "from d3d_jax.data.packing import pack",
        },
    )
    (fault,) = wrong_arrows(tmp_path)
    assert "in a circle" in fault and "data" in fault and "pruning" in fault


def test_a_planted_circle_between_files_of_a_room_is_caught(tmp_path):
    plant(
        tmp_path,
        {
            "d3d_jax/data/builder.py": "from d3d_jax.data.documents import Row\nimport numpy",
            "d3d_jax/data/documents.py": "def load():\n    from d3d_jax.data import builder",
            "d3d_jax/data/rows.py": "import d3d_jax.data.builder",
        },
    )
    assert {"d3d_jax.data.builder", "d3d_jax.data.documents"} <= set(circle_of_files(tmp_path).split(" <- "))
    (tmp_path / "d3d_jax/data/documents.py").write_text("import numpy")
    assert circle_of_files(tmp_path) == ""


def test_a_planted_room_file_or_name_is_caught(tmp_path):
    plant(
        tmp_path,
        {
            "d3d_jax/tools/__init__.py": "",
            "d3d_jax/models/qwen3.py": "x = 1\n" * 401,
            "d3d_jax/demo/weights.json": "{}",
            "kernels/d3d_kernels/utils.py": "x = 1\n" * 600,
        },
    )
    assert [fault.split()[0] for fault in unknown_rooms(tmp_path)] == ["d3d_jax/models", "d3d_jax/tools"]
    assert [fault.split()[0] for fault in unwelcome_files(tmp_path)] == [
        "d3d_jax/models/qwen3.py",
        "kernels/d3d_kernels/utils.py:",
    ]
