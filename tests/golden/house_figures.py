"""Figures of the house, of one checkout or several side by side: python tests/golden/house_figures.py [CHECKOUT ...]"""

import ast
import pathlib
import sys

MOST_LINES, MOST_PARAMETERS = 60, 8
CORE = ("models", "ops", "sharding", "optim", "train", "training")


def functions(tree: ast.AST) -> list[ast.FunctionDef]:
    """All functions and methods."""
    return [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


def parameters(function: ast.FunctionDef) -> int:
    """How many it takes, self left out."""
    args = function.args
    named = [one.arg for one in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    return len([name for name in named if name not in ("self", "cls")])


def module_imports(tree: ast.Module, known: set[str]) -> set[str]:
    """Our modules that an import of this one loads, at its top."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    parents = {".".join(name.split(".")[:end]) for name in found for end in range(1, name.count(".") + 2)}
    return parents & known


def closure(start: str, imports: dict[str, set[str]]) -> set[str]:
    """The modules that an import of `start` loads."""
    found, waiting = set(), [start]
    while waiting:
        if (name := waiting.pop()) not in found:
            found.add(name)
            waiting += imports[name]
    return found


def figures(root: pathlib.Path) -> dict[str, str]:
    """{what: the figure}."""
    package = root / "jaxscale"
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    names = {path: ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__") for path in texts}
    lines = {names[path]: len(text.splitlines()) for path, text in texts.items()}
    imports = {names[path]: module_imports(tree, set(lines)) for path, tree in trees.items()}
    built = closure("jaxscale.build", imports)
    found = [(path, one) for path, tree in trees.items() for one in functions(tree)]
    long = sorted((one.end_lineno - one.lineno + 1, one.name) for _, one in found)
    tests = [path.read_text(encoding="utf-8") for path in sorted((root / "tests").rglob("*.py"))]
    room = lambda names: sum(size for name, size in lines.items() if name.partition(".")[2].split(".")[0] in names)
    readme = (root / "README.md").read_text(encoding="utf-8")
    return {
        "files; lines of the package": f"{len(lines)}; {sum(lines.values()):,}",
        "of them core and kernels": f"{room(CORE):,}",
        "files; lines that importing build loads": f"{len(built)}; {sum(lines[name] for name in built):,}",
        "files that importing config loads": str(len(closure("jaxscale.config", imports))),
        f"functions over {MOST_LINES} lines": ", ".join(f"{name} {size}" for size, name in long if size > MOST_LINES)
        or "none",
        f"functions with over {MOST_PARAMETERS} parameters": str(
            sum(parameters(one) > MOST_PARAMETERS for _, one in found)
        ),
        "files over 400 lines": str(sum(size > 400 for size in lines.values())),
        "files under 60 lines": str(sum(size < 60 for size in lines.values())),
        "monkeypatch.setattr in tests": str(sum(text.count("monkeypatch.setattr(") for text in tests)),
        "noqa: E402 in the package": str(sum(text.count("noqa: E402") for text in texts.values())),
        "jax.named_scope": str(sum(text.count("named_scope(") for text in texts.values())),
        "lines; words of README": f"{len(readme.splitlines())}; {len(readme.split()):,}",
    }


if __name__ == "__main__":
    columns = [figures(pathlib.Path(arg)) for arg in sys.argv[1:] or [pathlib.Path(__file__).parents[2]]]
    for what in columns[0]:
        print(" | ".join(["", what, *(column[what] for column in columns), ""]).strip())
