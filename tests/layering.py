"""Reads the sources and reports what breaks the order of imports or the house style; runs nothing of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# A unit may import units of lower rows, and itself; units of one row do not import each other.
ROWS: tuple[tuple[str, ...], ...] = (
    ("engine._C", "engine.kernels", "engine.atomic_files", "engine.choices", "engine.file_lock", "engine.forks"),
    ("engine.reference",),
    ("engine.ops",),
    (
        "engine.features",
        "engine.images",
        "engine.crops",
        "engine.segments",
        "engine.metrics",
        "engine.datasets",
        "engine.scenes",
    ),
    ("engine.encoders", "engine.heads", "engine.store"),
    ("engine.scorers",),
    ("engine.engine",),
    (
        "engine.retrieval",
        "engine.training",
        "engine.benchmarks",
        "engine.diagnostics",
        "engine.export",
        "engine.doctor",
    ),
    ("engine.results",),
    ("engine.cli", "engine.web"),
)
ROW_OF = {unit: row for row, units in enumerate(ROWS) for unit in units}
# engine/__init__.py re-exports what users need: it stands below the command line and above all else.
FACADE, FACADE_ROW = "engine", 8.5
SPEAKING_ROW = 9

SOURCE_FOLDERS = {"engine": "engine", "kernels": "engine.kernels"}
ALL_FOLDERS = ("engine", "kernels", "csrc", "tests", "bench")
OUTSIDERS = ("tests", "bench", "kernels")

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 120
MAX_PARAMETERS = 7
# An op has one parameter for each of its tensors and switches, and so has its specification.
MANY_PARAMETERS = frozenset({"engine.kernels", "engine.ops", "engine.reference"})
# What may stand alone at the top of a module: it completes an op of our own.
COMPLETING_CALLS = (".register_autograd", ".register_fake", ".register_kernel")
# Calls that change the whole process, unless they stand in a `with` that takes back what they do.
GLOBAL_CALLS = frozenset(
    {
        *("os.putenv", "os.unsetenv", "os.chdir", "os.umask", "sys.setrecursionlimit", "locale.setlocale"),
        *("os.environ.update", "os.environ.setdefault", "os.environ.pop", "os.environ.clear", "sys.path.append"),
        *("sys.path.insert", "random.seed", "np.random.seed", "numpy.random.seed", "torch.manual_seed"),
        *("warnings.filterwarnings", "warnings.simplefilter", "logging.basicConfig", "np.seterr", "numpy.seterr"),
        *("torch.set_num_threads", "torch.set_num_interop_threads", "torch.set_default_dtype"),
        *("torch.set_default_device", "torch.set_grad_enabled", "torch.set_float32_matmul_precision"),
        *("torch.use_deterministic_algorithms", "torch.set_flush_denormal", "matplotlib.use", "gc.disable"),
    }
)
TAKING_BACK = {"torch.manual_seed": "fork_rng", "warnings": "catch_warnings"}
# Where such a call is what the user asked for and is taken back at the end.
TAKEN_BACK = frozenset(
    (f"engine.{run}", "torch.set_num_threads") for run in ("training.scenes", "training.heads", "forks")
)
VAGUE_NAMES = frozenset({"legacy", "v2", "new", "utils", "helpers", "misc"})
IMPORTING_CALLS = frozenset({"importlib.import_module", "import_module", "__import__"})
LEAVING_CALLS = frozenset({"sys.exit", "os._exit", "exit", "quit", "os.abort"})


@dataclass(frozen=True)
class Module:
    """A Python file and the dotted name it is imported by."""

    path: Path
    name: str
    tree: ast.Module

    @property
    def package(self) -> str:
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]


def modules(root: Path) -> Iterator[Module]:
    """Every Python file of the installed package."""
    for folder, package in SOURCE_FOLDERS.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            name = ".".join((package, *(part for part in parts if part != "__init__")))
            yield Module(path, name, ast.parse(path.read_text(encoding="utf-8"), str(path)))


def unit_of(name: str) -> str:
    """The unit a dotted name below `engine` belongs to: its first two parts, or the facade itself."""
    return ".".join(name.split(".")[:2])


def row_of(unit: str) -> float | None:
    """The unit's row; None where the table has none."""
    return FACADE_ROW if unit == FACADE else ROW_OF.get(unit)


def imports(module: Module, known: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Line and full name of all that a file imports, at its top, in functions, or by a constant name."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.package.split(".")[: len(module.package.split(".")) - node.level + 1]
                base = ".".join((*parents, base) if base else parents)
            for alias in node.names:
                # `from engine import images` reaches the module, `from engine import load` the facade.
                inner = f"{base}.{alias.name}"
                yield node.lineno, inner if inner in known or unit_of(inner) in ROW_OF else base
        elif isinstance(node, ast.Call) and dotted(node.func) in IMPORTING_CALLS and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield node.lineno, first.value


def dotted(node: ast.expr) -> str:
    """`a.b.c` of a name or attribute; empty for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def import_faults(root: Path) -> list[str]:
    """Imports that go sideways or upwards, units without a row, and imports of tests or bench."""
    files = list(modules(root))
    known = frozenset(module.name for module in files)
    faults = []
    for module in files:
        where = module.path.relative_to(root).as_posix()
        unit = unit_of(module.name)
        row = row_of(unit)
        if row is None:
            faults.append(f"{where}: {unit} has no row in the table of layers")
            continue
        for line, target in imports(module, known):
            top = target.partition(".")[0]
            if top in OUTSIDERS:
                faults.append(f"{where}:{line}: imports {target}, which is not part of the package")
            if top != "engine" or unit_of(target) == unit:
                continue
            target_row = row_of(unit_of(target))
            if target_row is None:
                faults.append(f"{where}:{line}: imports {target}, which has no row in the table of layers")
            elif target_row >= row:
                faults.append(f"{where}:{line}: {unit} (row {row:g}) imports {target} (row {target_row:g})")
    return faults


def speech_faults(root: Path) -> list[str]:
    """Printing and exiting outside the command line."""
    faults = []
    for module in modules(root):
        row = row_of(unit_of(module.name))
        if row == SPEAKING_ROW:
            continue
        where = module.path.relative_to(root).as_posix()
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and dotted(node.func) in ("print", "rich.print", "builtins.print"):
                faults.append(f"{where}:{node.lineno}: prints")
            elif isinstance(node, ast.Attribute) and dotted(node) in ("sys.stdout.write", "sys.stderr.write"):
                faults.append(f"{where}:{node.lineno}: writes to a standard stream")
            elif (isinstance(node, ast.Call) and dotted(node.func) in LEAVING_CALLS) or (
                isinstance(node, ast.Name) and node.id == "SystemExit"
            ):
                faults.append(f"{where}:{node.lineno}: exits")
    return faults


def size_faults(root: Path) -> list[str]:
    """Files and functions that are too long."""
    faults = []
    for folder in ALL_FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix not in (".py", ".cpp", ".hpp", ".h"):
                continue
            text = path.read_text(encoding="utf-8")
            where = path.relative_to(root).as_posix()
            n_lines = len(text.splitlines())
            if n_lines > MAX_FILE_LINES:
                faults.append(f"{where}: {n_lines} lines, at most {MAX_FILE_LINES}")
            if path.suffix != ".py":
                continue
            allowed = MAX_KERNEL_LINES if folder == "kernels" else MAX_FUNCTION_LINES
            for node in ast.walk(ast.parse(text, str(path))):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    length = (node.end_lineno or node.lineno) - node.lineno + 1
                    if length > allowed:
                        faults.append(
                            f"{where}:{node.lineno}: {node.name} has {length} lines, at most {allowed}"
                        )
    return faults


def parameter_faults(root: Path) -> list[str]:
    """Functions that take too many things to be called without looking them up."""
    faults = []
    for module in modules(root):
        if unit_of(module.name) in MANY_PARAMETERS:
            continue
        where = module.path.relative_to(root).as_posix()
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                listed = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                count = sum(argument.arg not in ("self", "cls") for argument in listed)
                if count > MAX_PARAMETERS:
                    faults.append(
                        f"{where}:{node.lineno}: {node.name} takes {count} parameters, at most {MAX_PARAMETERS}"
                    )
    return faults


def global_faults(root: Path) -> list[str]:
    """What happens at import, and what changes the whole process."""
    faults = []
    for module in modules(root):
        where = module.path.relative_to(root).as_posix()
        if module.path.name != "__main__.py":
            faults += [f"{where}:{node.lineno}: does something at import" for node in module.tree.body if _acts(node)]
        scopes = {
            id(inner): scope
            for node in ast.walk(module.tree)
            if isinstance(node, ast.With)
            for scope in TAKING_BACK.values()
            if any(scope in ast.unparse(item) for item in node.items)
            for inner in ast.walk(node)
        }
        imported = {
            (alias.asname or alias.name).partition(".")[0]
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Global):
                faults.append(f"{where}:{node.lineno}: global {', '.join(node.names)}")
            elif isinstance(node, ast.Call) and dotted(node.func) in GLOBAL_CALLS:
                called = dotted(node.func)
                if not _free(called, scopes.get(id(node))) and (module.name, called) not in TAKEN_BACK:
                    faults.append(f"{where}:{node.lineno}: {called} changes the whole process")
            elif isinstance(node, ast.Assign | ast.AugAssign | ast.Delete):
                targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
                for target in targets:
                    whole = target.value if isinstance(target, ast.Subscript) else target
                    name = dotted(whole)
                    if "." in name and name.partition(".")[0] in imported and not _free(name, scopes.get(id(node))):
                        faults.append(f"{where}:{node.lineno}: {name} is set for the whole process")
    return faults


def _free(name: str, scope: str | None) -> bool:
    """Whether the `with` around it takes back what a call or assignment by this name does."""
    return scope is not None and scope in (TAKING_BACK.get(name), TAKING_BACK.get(name.partition(".")[0]))


def _acts(node: ast.stmt) -> bool:
    """Whether a statement at the top of a module does more than to define and import."""
    if isinstance(node, ast.For | ast.While | ast.With | ast.Delete | ast.Raise):
        return True
    if not isinstance(node, ast.Expr) or isinstance(node.value, ast.Constant):
        return False
    return not (isinstance(node.value, ast.Call) and dotted(node.value.func).endswith(COMPLETING_CALLS))


def name_faults(root: Path) -> list[str]:
    """Names that say nothing, and public functions that take `**kwargs`."""
    faults = []
    for module in modules(root):
        where = module.path.relative_to(root).as_posix()
        if VAGUE_NAMES & set(module.name.split(".")):
            faults.append(f"{where}: a name that says nothing")
        for node in ast.walk(module.tree):
            if (
                isinstance(node, ast.FunctionDef)
                and node.args.kwarg is not None
                and not node.name.startswith("_")
            ):
                faults.append(f"{where}:{node.lineno}: public {node.name} takes **{node.args.kwarg.arg}")
    return faults
