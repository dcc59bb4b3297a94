"""Where tests replace functions and classes of ours: python tests/golden/own_patches.py

A constant, such as the seconds that something waits, is none, nor is what belongs to Python or to another package.
"""

import ast
import builtins
import pathlib
import pkgutil

TESTS = pathlib.Path(__file__).parents[1]
PATCHERS = ("setattr", "delattr", "setitem", "patch", "object")  # of pytest's monkeypatch and of unittest.mock


def own_patches(source: str) -> list[int]:
    """The lines of a test file that replace a function or a class of the package, or a method of one."""
    tree = ast.parse(source)
    imported = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            start = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                whole = alias.name if alias.asname or start else alias.name.partition(".")[0]
                imported[alias.asname or whole] = start + whole
    lines = []
    for block in tree.body:
        texts = {str(node.value) for node in ast.walk(block) if isinstance(node, ast.Constant)}
        for call in ast.walk(block):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in PATCHERS:
                if call.args and replaces_ours(*call.args[:2], imported=imported, texts=texts):
                    lines.append(call.lineno)
    return sorted(lines)


def replaces_ours(owner: ast.expr, name: ast.expr | None = None, *, imported: dict[str, str], texts: set[str]) -> bool:
    """Whether these arguments name something of ours that is called; what cannot be known is taken for ours.

    texts: of the test, among which is what a variable has for a name.
    """
    if isinstance(owner, ast.Constant):
        return is_ours(str(owner.value))
    roots = [node.id for node in ast.walk(owner) if isinstance(node, ast.Name) and node.id not in dir(builtins)]
    if not roots or not isinstance(owner, ast.Name | ast.Attribute) or roots[0] not in imported:
        return any(imported.get(root, "jaxscale").startswith("jaxscale") for root in roots)
    place = imported[roots[0]] + ast.unparse(owner).removeprefix(roots[0])
    return any(is_ours(f"{place}.{one}") for one in ([name.value] if isinstance(name, ast.Constant) else texts))


def is_ours(dotted: str) -> bool:
    """Whether the name is that of a function, method or class of the package."""
    if not dotted.startswith("jaxscale."):
        return False
    try:
        found = pkgutil.resolve_name(dotted)
    except (AttributeError, ImportError, ValueError):  # some other text of the test
        return False
    return callable(found) and getattr(found, "__module__", "").startswith("jaxscale")


if __name__ == "__main__":
    for path in sorted(TESTS.rglob("*.py")):
        for line in own_patches(path.read_text(encoding="utf-8")):
            print(f"{path.relative_to(TESTS)}:{line}")
