"""What a user reads before anything is installed, and what is published: install lines, licences, links, versions."""

import re
import tomllib
from pathlib import Path

import lade
from scripts import absolute_links, check_site

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SHOWN = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(path for path in (ROOT / "examples").rglob("*") if path.suffix not in {".pyc"} and path.is_file()),
    *(path for folder in ("lade", "lab/lade_lab") for path in (ROOT / folder).rglob("*.py")),
    *(path for path in (ROOT / "lade" / "recipe" / "folder").rglob("*.*") if path.suffix in {".md", ".txt"}),
]
CONTAINER = ROOT / "examples" / "container"


def unavailable(text: str) -> list[str]:
    """Install lines that would ask an index for this package, which is on none yet.

    `pip install "lookahead-decoding[extra]"` is met by an installed package, so errors of it may say that.
    """
    lines = re.findall(r"pip install [^\n`#]*lookahead-decoding[^\n]*", text)
    return [line for line in lines if not re.search(r"\"lookahead-decoding\[\{extra\}\]|in a checkout", line)]


def test_every_install_line_works_from_a_checkout_and_its_extras_exist_and_others_would_be_noticed():
    wrong = {str(path.relative_to(ROOT)): unavailable(path.read_text(encoding="utf-8")) for path in SHOWN}
    assert {path: lines for path, lines in wrong.items() if lines} == {}
    assert unavailable('RUN pip install lookahead-decoding\n$ pip install "lookahead-decoding[serve]"\n') != []
    assert unavailable("$ pip install '.[serve]'\n") == []
    text = "\n".join(path.read_text(encoding="utf-8") for path in SHOWN)
    named = set(re.findall(r"pip install (?:\S+ )*'[./a-z]*\[(\w+)\]'", text))
    assert {"serve", "grammar", "scale"} <= named <= set(PROJECT["optional-dependencies"])


def test_every_licence_text_is_shipped_and_every_licence_is_named():
    files = {path for pattern in PROJECT["license-files"] for path in ROOT.glob(pattern)}
    texts = [path for path in (ROOT / "lade").rglob("*LICENSE*") if path.is_file()]
    assert {*texts, ROOT / "LICENSE"} == files
    assert set(PROJECT["license"].split(" AND ")) == {"Apache-2.0", "BSD-3-Clause", "MIT", "PSF-2.0"}


def relative(text: str) -> list[str]:
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"https?:|#", link)]


def test_the_readme_of_an_index_has_no_relative_links():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    moved = absolute_links.absolute(readme, "https://example.org/a/b/", "v1")
    assert len(relative(readme)) > 10 and relative(moved) == []
    assert "(https://example.org/a/b/raw/v1/docs/images/output.svg)" in moved
    assert "(https://example.org/a/b/blob/v1/docs/howto/slower.md)" in moved
    before, after = (re.findall(r"\]\((http[^)]+)\)", text) for text in (readme, moved))
    assert before == [link for link in after if "example.org" not in link]


def test_the_version_is_in_one_place_where_the_check_of_a_tag_finds_it():
    assert "version" in PROJECT["dynamic"] and "version" not in PROJECT
    places = [ROOT / "README.md", ROOT / "CITATION.cff", ROOT / "Makefile", ROOT / "pyproject.toml"]
    assert [path.name for path in places if lade.__version__ in path.read_text(encoding="utf-8")] == []
    assert f"## [{lade.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    publish = (ROOT / ".github" / "workflows" / "publish.yml").read_text(encoding="utf-8")
    assert r'grep -qxF "__version__ = \"${GITHUB_REF_NAME#v}\"" lade/version.py' in publish
    assert f'__version__ = "{lade.__version__}"' in (ROOT / "lade" / "version.py").read_text().splitlines()


def test_actions_are_pinned_to_commits():
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        used = re.findall(r"uses: (\S+)", path.read_text(encoding="utf-8"))
        assert used and all(re.search(r"@[0-9a-f]{40}$", action) for action in used), path.name


def test_the_page_shows_the_files_of_the_container_which_serves_as_a_user_of_its_own_and_is_probed():
    from lade.server.settings import PROBES

    page = (ROOT / "docs" / "howto" / "containers.md").read_text(encoding="utf-8")
    assert f"```dockerfile\n{(CONTAINER / 'Dockerfile').read_text()}```" in page
    assert f"```ini\n{(CONTAINER / 'lade.service').read_text()}```" in page
    lines = (CONTAINER / "Dockerfile").read_text()
    assert "ARG TORCH=torch\n" in lines and "[serve]" in lines and "\nUSER lade\n" in lines
    (probe,) = re.findall(r"http://127\.0\.0\.1:8000(/\w+)", lines)
    assert probe in PROBES and "HEALTHCHECK" in lines


def test_examples_that_became_prose_and_signatures_on_one_line_would_be_noticed():
    nested = "<blockquote>\n<blockquote>\n<blockquote>\n<p>lade.generate(model)</p></blockquote></blockquote>"
    assert check_site.faults(nested) != [] and check_site.faults("<p>&gt;&gt;&gt; x</p>") != []
    wide = '<div class="doc-signature highlight"><code><span>f</span>(' + "x, " * 60 + ")</code></div>"
    assert check_site.faults(wide) == ["a signature of 183 characters on one line"]
    function = '<div class="doc doc-object doc-function"><h2>f(x, y, z)</h2></div>'
    assert check_site.faults(function) == ["0 signatures in blocks of their own for 1 functions"]
    assert check_site.faults(function + '<div class="doc-signature highlight"><code>f(\nx\n)</code></div>') == []
    fonts = '<link rel="stylesheet" href="https://fonts.example.org/x.css"><link rel="canonical" href="https://a.b/">'
    assert check_site.faults(fonts) == ["https://fonts.example.org/x.css is loaded from elsewhere"]
    fine = "<blockquote><p>x</p></blockquote><pre><code>&gt;&gt;&gt; <span>x</span></code></pre>"
    assert check_site.faults(fine) == []


def test_a_site_without_pages_is_no_success(tmp_path, capsys):
    assert check_site.main(tmp_path) == 1 and "has no pages" in capsys.readouterr().out
    (tmp_path / "index.html").write_text("<p>fine</p>")
    assert check_site.main(tmp_path) == 0
    (tmp_path / "index.html").write_text("<p>&gt;&gt;&gt; x</p>")
    assert check_site.main(tmp_path) == 1 and "index.html: a prompt" in capsys.readouterr().out
