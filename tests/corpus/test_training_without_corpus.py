"""Nothing that trains imports the room that builds shards, directly or through other files, at the top or inside."""

import pytest
from test_layers import ROOT, imports, parsed


def files_of(module):
    """The files of our own that importing a dotted name may run."""
    parts = module.split(".") if module.startswith("jaxscale") else []
    names = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return [ROOT / file for name in names for file in (f"{name}.py", f"{name}/__init__.py") if (ROOT / file).is_file()]


def closure(module):
    """Names of all files that may be run once the module is imported."""
    found, waiting = set(), files_of(module)
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            tree = parsed(path.read_text())
            waiting += [file for name, _, _ in imports(tree, str(path.relative_to(ROOT))) for file in files_of(name)]
    return {str(path.relative_to(ROOT)) for path in found}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "module", ["jaxscale.main", "jaxscale.runtime.training.loop", "jaxscale.config", "jaxscale.api"]
)
def test_training_never_imports_the_corpus_builder(module):
    assert not [name for name in closure(module) if name.startswith("jaxscale/tools/corpus/")]


def test_a_verb_that_prepares_a_corpus_does():
    assert "jaxscale/tools/corpus/prepare/engine.py" in closure("jaxscale.cli.prepare")
