"""The public functions and classes of every module, read from the source: one page per package. Nothing is imported."""

import ast
import pathlib

from generators.words import docstring, escaped, fenced, table

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "jaxscale"
HEAD = """# {package}

{text}

"""


def pages() -> dict[str, str]:
    """{file: Markdown}."""
    packages: dict[str, list[pathlib.Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        packages.setdefault(package_of(parts), []).append(path)
    made = {f"api/{name}.md": package_page(name, paths) for name, paths in packages.items()}
    rows = [[f"[`{title(name)}`](api/{name}.md)", escaped(about(name))] for name in packages]
    made["api.md"] = (
        "# Python\n\nAll public functions and classes. See [Architecture](../architecture.md) for the imports.\n\n"
        + table(["package", "contents"], rows)
    )
    return made


def package_of(parts: tuple[str, ...]) -> str:
    """'runtime.data' for a module in runtime/data; 'top' for one at the top."""
    grouped = parts[0] in ("core", "runtime", "tools") and len(parts) > 2
    return ".".join(parts[: 2 if grouped else 1]) if len(parts) > 1 else "top"


def title(package: str) -> str:
    """'jaxscale.runtime.data', or 'jaxscale' for the modules at the top."""
    return "jaxscale" if package == "top" else f"jaxscale.{package}"


def about(package: str) -> str:
    """Returns the first line of the package's docstring."""
    path = PACKAGE / "__init__.py" if package == "top" else PACKAGE / package.replace(".", "/") / "__init__.py"
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split())


def package_page(package: str, paths: list[pathlib.Path]) -> str:
    """Returns the page of a package: all its modules."""
    parts = [module(path) for path in paths if path.name != "__init__.py" or has_entries(path)]
    return HEAD.format(package=title(package), text=escaped(about(package))) + "\n".join(parts)


def module(path: pathlib.Path) -> str:
    """A module: what it is for, and what it offers. Raises ValueError for one that does not say what it is for."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    said = ast.get_docstring(tree)
    if said is None:
        raise ValueError(f"{path.relative_to(ROOT)} has no docstring; its first line says what the module is for")
    return "\n".join([f"## {name}\n", docstring(said), *(entry(node) for node in tree.body if is_public(node))])


def has_entries(path: pathlib.Path) -> bool:
    """Whether a package's own file offers more than its docstring, which stands at the top of the page."""
    return any(is_public(node) for node in ast.parse(path.read_text(encoding="utf-8")).body)


def is_public(node: ast.stmt) -> bool:
    """True for a function or class that is not private and says what it is."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return isinstance(node, kinds) and not node.name.startswith("_") and ast.get_docstring(node) is not None


def entry(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
    """A function, or a class with its methods: signature and docstring."""
    if not isinstance(node, ast.ClassDef):
        return f"### {escaped(node.name)}\n\n{fenced(signature(node), 'python')}\n{docstring(ast.get_docstring(node))}"
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    head = f"class {node.name}({bases})" if bases else f"class {node.name}"
    fields = [
        f"    {ast.unparse(one.target)}: {ast.unparse(one.annotation)}"
        for one in node.body
        if isinstance(one, ast.AnnAssign) and not ast.unparse(one.target).startswith("_")
    ]
    methods = [
        f"{fenced(signature(one), 'python')}\n{docstring(ast.get_docstring(one))}"
        for one in node.body
        if is_public(one)
    ]
    text = fenced("\n".join([head, *fields]), "python")
    return "\n".join([f"### {escaped(node.name)}\n", text, docstring(ast.get_docstring(node)), *methods])


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """'def name(a: int) -> str', broken after commas where it is long."""
    start = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    whole = f"{start} {node.name}({ast.unparse(node.args)}){returns}"
    if len(whole) <= 88:
        return whole
    lines = [f"    {one}," for one in arguments(node.args)]
    return "\n".join([f"{start} {node.name}(", *lines, f"){returns}"])


def arguments(args: ast.arguments) -> list[str]:
    """Each argument as it is written, with its type and default."""
    found, plain = [], [*args.posonlyargs, *args.args]
    defaults = [None] * (len(plain) - len(args.defaults)) + list(args.defaults)
    for place, (one, default) in enumerate(zip(plain, defaults)):
        found.append(argument(one, default))
        if args.posonlyargs and place == len(args.posonlyargs) - 1:
            found.append("/")
    if args.vararg or args.kwonlyargs:
        found.append(f"*{ast.unparse(args.vararg)}" if args.vararg else "*")
    found += [argument(one, default) for one, default in zip(args.kwonlyargs, args.kw_defaults)]
    return [*found, f"**{ast.unparse(args.kwarg)}"] if args.kwarg else found


def argument(one: ast.arg, default: ast.expr | None) -> str:
    """'name: type = default'."""
    equals = " = " if one.annotation else "="
    return ast.unparse(one) + (f"{equals}{ast.unparse(default)}" if default else "")
