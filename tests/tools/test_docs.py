"""Every example in a docstring, the README and the docs runs; every public name has its help."""

import doctest
import importlib.util
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sparse_attn as sa

MODULES = [
    module.name.removeprefix("sparse_attn.")
    for module in pkgutil.walk_packages(sa.__path__, "sparse_attn.")
    if not module.name.startswith(("sparse_attn._C", "sparse_attn._info", "sparse_attn.integr"))
    and not module.name.endswith("__main__")  # runs when imported
]


ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
#: Python of a page, in the order of the page; what stands in a comment is not shown to readers.
SNIPPET = re.compile(
    r"(?:^```python\n(.*?)^```$)|(?:^<!-- python\n(.*?)^-->$)", re.DOTALL | re.MULTILINE
)


def snippets(page):
    """The page's Python, each piece at the line where it stands, so that a failure names it."""
    text = page.read_text()
    for found in SNIPPET.finditer(text):
        group = found.lastindex
        yield "\n" * text.count("\n", 0, found.start(group)) + found.group(group)


#: Where files lie that pages name.
PLACES = (ROOT, ROOT / "csrc", ROOT / "csrc/cpu", ROOT / "csrc/cuda", ROOT / "sparse_attn")

WITH_SNIPPETS = {str(page.relative_to(ROOT)): page for page in PAGES if any(snippets(page))}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WITH_SNIPPETS)
def test_snippets_run(device, tmp_path, monkeypatch, name):
    """A page's snippets run in its order, the later ones with what the earlier ones made."""
    if device != "cpu":
        pytest.skip("examples make CPU tensors")
    monkeypatch.chdir(tmp_path)
    known = {"__name__": "__main__"}
    for snippet in snippets(WITH_SNIPPETS[name]):
        exec(compile(snippet, name, "exec"), known)


def test_links_and_files_that_pages_name_exist():
    """The site checks its own links; these are those of the pages beside it, and names of files."""
    missing = []
    for page in PAGES:
        text = page.read_text()
        links = re.findall(r"\]\((?!https?:)([^)#\s]+)", text)
        missing += [(page.name, link) for link in links if not (page.parent / link).exists()]
        if page.name == "CHANGELOG.md":
            continue  # tells of files that are gone
        files = re.findall(r"`((?:\w+/)+\w+\.(?:py|h|cpp|cu|cuh|md|json))`", text)
        missing += [
            (page.name, file)
            for file in files
            if "results/" not in file and not any((place / file).exists() for place in PLACES)
        ]
    assert missing == []


def test_names_stand_in_the_files_that_pages_name_beside_them():
    """Such as `kTransforms` (`cuda/common/plain_scores.h`)."""
    missing = []
    for page in (page for page in PAGES if page.name != "CHANGELOG.md"):
        pairs = re.findall(r"`(\w+)`\s+\(`((?:\w+/)+\w+\.\w+)`\)", page.read_text())
        for name, file in pairs:
            (text,) = (path.read_text() for place in PLACES if (path := place / file).exists())
            if not re.search(rf"\b{name}\b", text):
                missing.append((page.name, name, file))
    assert missing == []


def test_tables_are_whole():
    """A line of a table after an empty one would be shown as text."""
    torn = []
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        torn += [(page.name, row) for row in re.findall(r"\n\n(\|.*)\n(?!\|[-:])", text)]
    assert torn == []


@pytest.mark.parametrize(
    ("section", "like"), [("a common argument", "alibi_slopes"), ("a pattern", "Strided")]
)
def test_places_are_listed_where_the_guide_says_how_to_add_something(section, like):
    """The modules that name what is like it; functions that are written aside."""
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    listed = guide.partition(f"## Add {section}\n")[2].partition("\n## ")[0]
    written = {path.stem for path in (ROOT / "scripts/templates/functional").iterdir()}
    places = [
        path.relative_to(ROOT / "sparse_attn").as_posix()
        for path in (ROOT / "sparse_attn").rglob("*.py")
        if path.name not in written and re.search(rf"\b{like}\b", path.read_text())
    ]
    assert places and [place for place in places if f"{place}`" not in listed] == []


def test_every_page_is_in_the_menu():
    menu = (ROOT / "mkdocs.yml").read_text()
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES if page.parent != ROOT}
    assert {page for page in pages if not page.startswith("results/")} == set(
        re.findall(r": ([\w/]+\.md)$", menu, re.MULTILINE)
    )


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", MODULES)
def test_examples_run(device, name):
    if device != "cpu":
        pytest.skip("examples make CPU tensors")
    module = importlib.import_module(f"sparse_attn.{name}")
    assert doctest.testmod(module).failed == 0


def test_a_swapped_encoder_keeps_its_output(device, monkeypatch, capsys):
    """As the README says, by the example that it names."""
    if device != "cpu":
        pytest.skip("examples make CPU tensors")
    spec = importlib.util.spec_from_file_location("encoder", ROOT / "examples" / "encoder.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(example, "LENGTHS", {"cpu": (200,)})
    example.main()
    assert float(capsys.readouterr().out.split()[-1]) < 3e-7


@pytest.mark.parametrize("name", sa.__all__)
def test_public_names_are_documented(name):
    item = getattr(sa, name)
    assert inspect.getdoc(item)
    if name.endswith("_attention") and name not in ("swap_attention", "restore_attention"):
        doc = inspect.getdoc(item)
        for word in ("Parameters", "Returns", "Raises", "Examples", "query_offset", "key_bounds"):
            assert word in doc, f"{name} does not explain {word}"
        assert "{" not in doc.replace('{"auto"', "").replace('{"mean"', "")


CLASSES = {
    name: item
    for package in (sa, sa.nn, sa.quality)
    for name in package.__all__
    if inspect.isclass(item := getattr(package, name)) and name != "Common"
}


@pytest.mark.parametrize("name", CLASSES)
def test_public_classes_and_their_methods_have_an_example(name):
    """But `allows`, which says a pattern's rule in words, and what torch asks of modules."""
    methods = {
        f"{name}.{method}": item
        for method, item in inspect.getmembers(CLASSES[name], callable)
        if not method.startswith("_") and item.__module__.startswith("sparse_attn.")
    }
    for method in ("allows", "extra_repr"):
        methods.pop(f"{name}.{method}", None)
    without = [
        known
        for known, item in {name: CLASSES[name], **methods}.items()
        if "Examples\n--------" not in (inspect.getdoc(item) or "")
    ]
    assert without == []


def test_public_names_are_in_the_reference():
    named = re.findall(
        r"^::: sparse_attn\.([\w.]+)$", (ROOT / "docs/reference.md").read_text(), re.M
    )
    modules = {name for name in sa.__all__ if inspect.ismodule(getattr(sa, name))}
    assert set(sa.__all__) - modules == {
        name for name in named if name != "testing" and "." not in name
    }


def test_import_is_light():
    code = (
        "import sys, sparse_attn; "
        "heavy = {'matplotlib', 'transformers', 'sparse_attn.integrations.transformers'}; "
        "assert not heavy & set(sys.modules), heavy & set(sys.modules); "
        "import torch; assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
