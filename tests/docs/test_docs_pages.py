"""The pages that are made of the code have all of it, and the written ones name nothing that is not there."""

import functools
import importlib.util
import re
import sys

import pytest
from shell_blocks import ROOT

from jaxscale import cli, schema
from jaxscale.config import RunConfig
from jaxscale.settings import config_file
from jaxscale.system.exits import Exit, may_start_again
from jaxscale.tools.corpus.prepare.config import PrepareConfig

sys.path[:0] = [str(ROOT / "docs")]
from generators import api, architecture, figures, nav, reading, recipes, words  # noqa: E402

from jaxscale.kernels.hardware import CHIPS  # noqa: E402

SPEC = importlib.util.spec_from_file_location("docs_build", ROOT / "docs" / "build.py")  # `build` is others' name too
build = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(build)

WRITTEN = sorted((ROOT / "docs").rglob("*.md"))
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(?:#[^)]*)?\)")

ANCHOR = re.compile(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)")


def of_docs(path):
    return path.relative_to(ROOT / "docs").as_posix()


@pytest.fixture(scope="module")
def made():
    """{file under docs/: text} of all generated pages."""
    return {f"reference/{name}": text for module in build.REFERENCE for name, text in module.pages().items()}


def test_every_setting_verb_code_chip_and_config_is_in_the_reference(made):
    names = [name for name, *_ in schema.describe(RunConfig)]
    page = made["reference/settings.md"]
    assert len(names) > 200 and not [name for name in names if f"| `{name}`" not in page]
    free = schema.changeable(RunConfig)  # what may change when a run goes on is marked
    may = lambda name: any(name == one or name.startswith(f"{one}.") for one in free)
    assert (
        not [name for name in names if (f"| `{name}` **c** |" in page) != may(name)] and may("mesh") and not may("seed")
    )
    assert all(f"reference/verbs/{verb}.md" in made for verb in cli.VERBS)
    plan = made["reference/verbs/plan.md"]
    assert "--topology=NAME" in plan and "model.vocab_size" not in plan
    for code in Exit:
        (row,) = re.findall(rf"^\| {int(code)} \| `{code.name}` \| .*$", made["reference/exit_codes.md"], re.M)
        assert code.event in row and row.endswith("| yes |" if may_start_again(code) else "| no |")
    assert all(f"`{kind}`" in made["reference/chips.md"] for kind in CHIPS)
    found = {path.relative_to(ROOT).as_posix() for path in (ROOT / "configs").rglob("*.py")}
    assert not [name for name in found if f"## {name}\n" not in made["reference/configs.md"]]


def test_every_module_and_what_it_offers_is_in_the_reference(made):
    text = "".join(page for name, page in made.items() if name.startswith("reference/api/"))
    assert "## jaxscale.core.step\n" in text and "### make\\_train\\_step" in text
    modules = [path for path in (ROOT / "jaxscale").rglob("*.py") if path.name != "__init__.py"]
    missing = [path.name for path in modules if f".{path.stem}\n" not in text]
    assert len(modules) > 300 and not missing


def test_a_signature_is_written_as_it_stands():
    source = '''def find(path: str, /, *rest: int, deep: bool = False, **more: str) -> list[str]:\n    """Files."""'''
    (node,) = api.ast.parse(source).body
    assert api.signature(node) == "def find(path: str, /, *rest: int, deep: bool=False, **more: str) -> list[str]"
    assert api.arguments(node.args) == ["path: str", "/", "*rest: int", "deep: bool = False", "**more: str"]
    (bare,) = api.ast.parse("def f(a, b=1, *, c): pass").body
    assert api.arguments(bare.args) == ["a", "b=1", "*", "c"]


def test_words_are_no_markup():
    assert words.escaped("a_b *c* <d> `e_f` [g]") == r"a\_b \*c\* \<d\> `e_f` \[g\]"
    assert words.code("a|b") == "<code>a&#124;b</code>" and words.code("a_b") == "`a_b`"
    assert words.docstring("Says.\n\n  --x=1   y") == "Says.\n\n```text\n  --x=1   y\n```\n"


def test_numbers_of_pages_have_names_and_names_have_pages():
    used = set()
    for path in WRITTEN:
        names = set(build.NUMBER.findall(path.read_text(encoding="utf-8")))
        assert names <= set(figures.FIGURES), (of_docs(path), names - set(figures.FIGURES))
        used |= names
    assert used == set(figures.FIGURES)
    with pytest.raises(ValueError, match="docs/a.md: no number is called nothing"):
        build.fill("{{ nothing }}", figures.FIGURES, "a.md")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gpt3_both", "1,750 GB"), ("gpt3_cards", "22"), ("gpt3_state", "2,800 GB"), ("state_7b", "112 GB"),
        ("split_70b_zero1", "12 GB"), ("split_70b_zero3", "4.38 GB"), ("optimal_6e23", "70.7B on 1.41T"),
        ("over_7b", "7.1"), ("scores_of_70b", "687 GB"),
        ("bytes_mixed", "2 + 2 + 4 + 8 = 16"), ("bfloat16_stops_at", "256"),
        ("float16_max", "65,504"), ("first_loss_scale", "32,768"), ("remat_by_hand", "33%"),
        ("seven_on_1t_hours", "93.5K"),
    ],
)  # fmt: skip
def test_numbers_are_those_that_the_questions_have(name, said):
    assert figures.FIGURES[name]() == said


def test_nothing_near_is_lower_than_the_lowest_size():
    for law in (figures.scaling.BESIROGLU, figures.HOFFMANN):
        best = figures.lowest_params(6e23, law)
        losses = {
            size: figures.scaling.predicted_loss(size * best, 1e23 / (size * best), law) for size in (0.99, 1, 1.01)
        }
        assert losses[1] < min(losses[0.99], losses[1.01])
    refit = figures.scaling.predicted_loss
    grid = [refit(size * 1e9, 1e23 / (size * 1e9)) for size in range(10, 500)]
    half = figures.lowest_params(6e23, figures.scaling.BESIROGLU) / 2
    assert figures.valley(0.5) == pytest.approx(refit(half, 1e23 / half) - min(grid), abs=1e-6)


def test_a_slower_network_slows_a_step_down():
    fast, slow = (figures.plan_of("7b", "h100:64x8", network).time.speed for network in (1.0, 0.1))
    assert slow.link_seconds > 4 * fast.link_seconds and slow.step_seconds.low > fast.step_seconds.high
    assert slow.compute_seconds == fast.compute_seconds


def test_every_cited_paper_is_on_the_reading_list(monkeypatch):
    page = (ROOT / "docs" / "reading.md").read_text(encoding="utf-8")
    told = reading.with_places(page)
    assert "`jaxscale/tools/planning/loss_law.py`" in told and told.count("*In the code:*") > 30
    with pytest.raises(ValueError, match="docs/reading.md lacks arXiv:2203.15556, cited in jaxscale/"):
        reading.with_places(page.replace("arXiv:2203.15556", "arXiv:0000.00000"))
    assert "[arXiv:2001.08361](https://arxiv.org/abs/2001.08361))." in told
    nameless = page.replace("(Kaplan et al., arXiv:2001.08361)", "(arXiv:2001.08361)")
    for broken in (nameless, f"{page}- **A blog**, 2024.\n"):
        with pytest.raises(ValueError, match="docs/reading.md"):
            reading.with_places(broken)


def test_links_lead_to_pages(made):
    known = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*") if path.is_file()}
    known |= set(made) | {"changelog.md", "contributing.md"}
    lost = []
    for path in WRITTEN:
        for target in LINK.findall(path.read_text(encoding="utf-8")):
            found = (path.parent / target).resolve()
            inside = found.is_relative_to(ROOT / "docs")
            if not inside or found.relative_to(ROOT / "docs").as_posix() not in known:
                lost.append(f"{of_docs(path)}: {target}")
    assert not lost, lost


def headings_of(text):
    """Returns the anchors of a page's headings, as MkDocs makes them."""
    text = re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.MULTILINE | re.DOTALL)
    titles = [re.sub(r"[^\w\s-]", "", title).strip().lower() for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
    return {re.sub(r"[-\s]+", "-", title) for title in titles} | set(re.findall(r'id="([^"]+)"', text))


def test_links_lead_to_headings():
    lost = []
    for path in [*WRITTEN, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]:
        for target, anchor in ANCHOR.findall(path.read_text(encoding="utf-8")):
            page = (path.parent / target).resolve() if target else path
            if page.exists() and anchor not in headings_of(page.read_text(encoding="utf-8")):
                lost.append(f"{path.relative_to(ROOT).as_posix()}: {target}#{anchor}")
    assert not lost, lost


def test_no_page_names_a_path_of_one_machine():
    for path in [*WRITTEN, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        assert not re.search(r"(?<![\w.:])/(tmp|opt|work|home|root)/", path.read_text(encoding="utf-8")), of_docs(path)


def test_every_page_has_a_place_in_the_navigation():
    tree = [{"Start": "index.md"}, {"How to": ["howto/index.md"]}, {"Topics": []}, {"Reference": []}]
    pages = ["index.md", "howto/index.md", "howto/new.md", "new.md", "reference/verbs/plan.md"]
    assert sorted(nav.named(nav.completed(tree, pages))) == sorted(pages)
    with pytest.raises(ValueError, match="no section of docs/mkdocs.yml is for the folder odd"):
        nav.completed(tree, ["odd/page.md"])


def test_a_config_without_a_header_is_refused(tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "new.py").write_text("x = 1\n")
    monkeypatch.setattr(recipes, "ROOT", tmp_path)
    with pytest.raises(ValueError, match="configs/new.py has no docstring"):
        recipes.pages()


def test_a_paragraph_within_a_list_does_not_end_it():
    for path in WRITTEN:  # Python-Markdown wants four spaces, which others take for a block of code: put it before
        found = re.search(r"\n\n {1,3}[^ \n].*", path.read_text(encoding="utf-8"))
        assert found is None, f"{of_docs(path)}: {found[0].strip()}"


SENTENCES = [*WRITTEN, *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG"))]
NAMED = re.compile(r"[a-z_]+(\.[a-z_0-9]+)+")
FILE = re.compile(r"(?<![\w/.{*-])[a-z_]\w*(?:/[\w.-]+)*/[\w-]+\.(?:py|md|sh|yaml|sbatch|ipynb)\b")
NO_SETTING = re.compile(r"\.(safetensors|model|json|jsonl|txt)$")  # files, whose names look like settings


@functools.cache
def settings_known():
    return [name for cls in (RunConfig, PrepareConfig) for name, *_ in schema.describe(cls)]


def strange_names(text, folder):
    """Settings and files that the text names and nobody has, but for links, which have a test of their own."""
    text, known = LINK.sub("", text), settings_known()
    groups = {name.partition(".")[0] for name in known if "." in name} - {"evals"}  # whose names are a person's
    begins = {name[:end] for name in known for end in range(len(name) + 1) if name[end : end + 1] in (".", "")}
    spans = (re.split(r"[=\s({\[]", span)[0].removeprefix("--config.") for span in re.findall(r"`([^`\n]+)`", text))
    dotted = {word for word in spans if NAMED.fullmatch(word) and not NO_SETTING.search(word)}
    roots = (ROOT, ROOT / "jaxscale", ROOT / "docs", folder)
    files = {file for file in FILE.findall(text) if not any((root / file).exists() for root in roots)}
    return sorted(word for word in dotted - begins if word.partition(".")[0] in groups) + sorted(files)


def test_the_way_to_add_a_model_names_all_that_a_model_may_answer_in_its_own_way():
    page = (ROOT / "docs" / "howto" / "add_model.md").read_text(encoding="utf-8")
    asked = set(
        re.findall(
            r"    def ([a-z]\w+)\(self|^    (\w+): ClassVar",
            (ROOT / "jaxscale/core/models/config.py")
            .read_text(encoding="utf-8")
            .partition("class ModelConfig")[2]
            .partition("\n\n\n")[0],
            re.M,
        )
    )
    names = {name for pair in asked for name in pair if name} - {"embed_dtype", "block_matrix_params"}
    assert len(names) > 8 and not [name for name in names if f"`{name}" not in page]


def test_the_architecture_page_is_that_of_the_imports():
    for name, text in architecture.pages().items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == text, "python docs/build.py --gather renews it"
    with pytest.raises(ValueError, match="in a circle: a, b"):
        architecture.levels({"a": {"b"}, "b": {"a"}, "c": set()})


def test_the_readme_is_short_and_its_line_counts_are_exact():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    counted = re.findall(r"\| \[[\w/]+\.py\]\((jaxscale/[\w/]+\.py)\) \| (\d+) \|", text)
    assert len(counted) == 6
    actual = {path: len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path, _ in counted}
    assert {path: int(lines) for path, lines in counted} == actual


def test_parameter_counts_in_the_readme_are_those_of_the_configs():
    model = lambda name: config_file.load_config(str(ROOT / "configs" / name), {}).model
    quick, small, gpt2 = model("quickstart.py"), model("small_mixture.py:experts"), model("gpt2_124m.py")
    v3, k2 = model("deepseek_v3.py"), model("kimi_k2.py")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for expected in (
        f"a {quick.num_params / 1e6:.1f}M-parameter Llama model",
        f"Llama, {quick.num_params / 1e6:.1f}M",
        f"{small.experts.number} experts; {small.num_params / 1e6:.1f}M parameters, "
        f"{small.active_params / 1e6:.1f}M active",
        f"GPT-2, {gpt2.num_params / 1e6:.0f}M",
        f"{v3.num_params / 1e9:.0f}B parameters ({v3.active_params / 1e9:.1f}B active)",
        f"{k2.num_params / 1e12:.2f}T parameters ({k2.active_params / 1e9:.1f}B active)",
    ):
        assert expected in text


def test_settings_and_files_that_sentences_name_are_there():
    found = {path.name: strange_names(path.read_text(encoding="utf-8"), path.parent) for path in SENTENCES}
    assert not {page: names for page, names in found.items() if names}
    said = (
        "`optim.peak_rl=1`, `train.guard`, `--config.optim.peak_lr`, `evals.mine.file`, core/batch.py, `train/stepp.py`"
    )
    assert strange_names(said, ROOT) == ["optim.peak_rl", "train/stepp.py"]
